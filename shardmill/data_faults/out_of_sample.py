"""Probabilities of each row's classes, by a classifier that was fitted to other rows' embeddings.

The classifier has one Gaussian for each class with a common covariance (linear discriminant analysis). On the features
of a network it resists wrong labels: K. Lee et al., Robust Inference via Generative Classifiers for Handling Noisy
Labels, ICML 2019. Shape legend: N rows, D numbers of an embedding, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_FOLDS = 5
MAX_DIMENSIONS = 256
# A probability of 0 has no logarithm.
_SMALLEST_LOG = -700.0
_MAX_ROWS_CALIBRATED = 20_000


def out_of_sample_probabilities(embeddings_ND: np.ndarray, labels_N: np.ndarray, hashes_N: np.ndarray) -> np.ndarray:
    """float64, (N, K). Rows of equal hashes are in one fold; labels are the numbers from 0 to K - 1, each there."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.model_selection import PredefinedSplit, cross_val_predict

    # By the content alone, so that no order of the rows and no chance decides.
    folds_N = (hashes_N % np.uint64(NUM_FOLDS)).astype(np.int64)
    logs_NK: Any = cross_val_predict(
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        _reduced(embeddings_ND),
        labels_N,
        cv=PredefinedSplit(folds_N),
        method="predict_log_proba",
    )
    return _calibrated(np.clip(logs_NK, _SMALLEST_LOG, None), labels_N)


def _reduced(embeddings_ND: np.ndarray) -> np.ndarray:
    """The principal components, which know of no label, if an embedding has more numbers than a class has images."""
    if embeddings_ND.shape[1] <= MAX_DIMENSIONS:
        return embeddings_ND
    from sklearn.decomposition import PCA

    return PCA(min(MAX_DIMENSIONS, len(embeddings_ND)), random_state=0).fit_transform(embeddings_ND)


def _calibrated(logs_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """With the temperature at which the given labels are most probable: embeddings are no Gaussians, so that the
    classifier is too sure. It changes no order of classes (C. Guo et al., On Calibration of Modern Neural Networks,
    ICML 2017).
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax, softmax

    step = -(-len(logs_NK) // _MAX_ROWS_CALIBRATED)
    some_SK, given_S = logs_NK[::step], labels_N[::step]

    def mean_loss(log_temperature: float) -> float:
        logs_SK = log_softmax(some_SK / np.exp(log_temperature), axis=1)
        return -float(logs_SK[np.arange(len(given_S)), given_S].mean())

    best: Any = minimize_scalar(mean_loss, bounds=(-3.0, 6.0), method="bounded")
    return softmax(logs_NK / np.exp(best.x), axis=1)
