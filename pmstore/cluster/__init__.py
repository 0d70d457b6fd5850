"""scikit-learn's clusterers, with their state in a store: a fit that is killed continues after its last commit."""

from pmstore._errors import refuse_without

try:
    from pmstore.cluster._kmeans import KMeans
    from pmstore.cluster._mini_batch import MiniBatchKMeans
except ModuleNotFoundError as error:
    refuse_without("sklearn", error, "pmstore.cluster needs scikit-learn: pip install 'pmstore[sklearn]'")
    raise

__all__ = ["KMeans", "MiniBatchKMeans"]
