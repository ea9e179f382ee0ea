"""The pipelines of kme-dist, one short module each, built on the library's public interface.

In the repository they are in `pipelines/`; an installed kme-dist has them as `kme_dist.pipelines`.
The command line runs them: `kme-dist run CONFIG` is `run.run`, and so on.
"""
