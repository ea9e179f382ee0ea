"""The kernels under their public name: `from kme_dist.kernels import Gaussian`; see `kme_dist.core.kernels`."""

from kme_dist.core.kernels import *  # noqa: F403
from kme_dist.core.kernels import __all__ as __all__
