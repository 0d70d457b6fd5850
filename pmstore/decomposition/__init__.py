"""scikit-learn's decompositions, with their state in a store: a fit that is killed continues after its last commit."""

try:
    from pmstore.decomposition._incremental_pca import IncrementalPCA
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sklearn":
        raise
    raise ModuleNotFoundError(
        "pmstore.decomposition needs scikit-learn: pip install 'pmstore[sklearn]'", name=error.name
    ) from error

__all__ = ["IncrementalPCA"]
