"""`python -m kme_dist` is the `kme-dist` command."""

from kme_dist.cli import main

main()
