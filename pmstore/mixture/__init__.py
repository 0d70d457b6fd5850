"""scikit-learn's mixtures, with their state in a store: a fit that is killed continues after its last commit."""

try:
    from pmstore.mixture._mixtures import BayesianGaussianMixture, GaussianMixture
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sklearn":
        raise
    raise ModuleNotFoundError(
        "pmstore.mixture needs scikit-learn: pip install 'pmstore[sklearn]'", name=error.name
    ) from error

__all__ = ["BayesianGaussianMixture", "GaussianMixture"]
