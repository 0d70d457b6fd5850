"""scikit-learn's mixtures, with their state in a store: a fit that is killed continues after its last commit."""

from pmstore._errors import refuse_without

try:
    from pmstore.mixture._mixtures import BayesianGaussianMixture, GaussianMixture
except ModuleNotFoundError as error:
    refuse_without("sklearn", error, "pmstore.mixture needs scikit-learn: pip install 'pmstore[sklearn]'")
    raise

__all__ = ["BayesianGaussianMixture", "GaussianMixture"]
