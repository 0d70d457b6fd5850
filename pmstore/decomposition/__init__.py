"""scikit-learn's decompositions, with their state in a store: a fit that is killed continues after its last commit."""

from pmstore._errors import refuse_without

try:
    from pmstore.decomposition._incremental_pca import IncrementalPCA
except ModuleNotFoundError as error:
    refuse_without("sklearn", error, "pmstore.decomposition needs scikit-learn: pip install 'pmstore[sklearn]'")
    raise

__all__ = ["IncrementalPCA"]
