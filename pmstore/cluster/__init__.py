"""scikit-learn's clusterers, with their state in a store: a fit that is killed goes on where it was."""

from pmstore.cluster._kmeans import KMeans

__all__ = ["KMeans"]
