"""scikit-learn's clusterers, with their state in a store: a fit that is killed continues after its last commit."""

try:
    from pmstore.cluster._kmeans import KMeans
    from pmstore.cluster._mini_batch import MiniBatchKMeans
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sklearn":
        raise
    raise ModuleNotFoundError(
        "pmstore.cluster needs scikit-learn: pip install 'pmstore[sklearn]'", name=error.name
    ) from error

__all__ = ["KMeans", "MiniBatchKMeans"]
