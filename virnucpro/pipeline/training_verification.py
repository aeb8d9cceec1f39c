"""``verify`` of a training: is every file of the classifier as it was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.pipeline.prediction_run import is_intact
from virnucpro.pipeline.verification import Verification
from virnucpro.run_layout import TrainingLayout
from virnucpro.store.training_manifest import TrainingManifest

if TYPE_CHECKING:
    from pathlib import Path


def verify_training(output_dir: Path) -> Verification:
    """
    Check the files of a trained classifier by their sha256.

    Args:
        output_dir: The training's folder.

    Returns:
        What was found, counted in files; nothing is changed.

    Raises:
        ResultError: The folder holds no training.
    """
    layout = TrainingLayout(output_dir)
    manifest = TrainingManifest.read(layout.manifest)
    if manifest.state != "complete":
        problem = f"{layout.manifest}: the training is {manifest.state}: start the same command again to finish it"
        return Verification(manifest.state, len(manifest.files), 0, 0, [problem])
    problems = [
        f"{output_dir / name}: missing, or not what was written: train again with --restart"
        for name, sha256 in manifest.files.items()
        if not is_intact(output_dir / name, sha256)
    ]
    intact = len(manifest.files) - len(problems)
    return Verification(manifest.state, len(manifest.files), intact, 0, problems, what="files of the classifier")
