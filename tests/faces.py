"""
What users and their scripts see of the program, as text: help, forms, signatures, and the manifests of small runs.

``python -m tests.faces`` writes it into ``tests/faces/``; ``tests/unit/test_faces.py`` shows each difference.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "faces"
EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = (
    "",
    "predict",
    "train",
    "evaluate",
    "embed",
    "label-reads",
    "index",
    "verify",
    "status",
    "serve-reports",
    "models",
)
MORE_COMMANDS = ("models list", "models convert-classifier")
FIXED_NAMES = (
    "virnucpro.api:embed_fasta",
    "virnucpro.api:predict_fasta",
    "virnucpro.store.reader:read_embeddings",
    "virnucpro.store.reader:read_prediction",
    "virnucpro.pipeline.gpu_coordinator:GPUProcessCoordinator",
    "virnucpro.pipeline.gpu_coordinator:GPUProcessCoordinator.spawn_workers",
    "virnucpro.pipeline.gpu_coordinator:GPUProcessCoordinator.wait_for_completion",
    "virnucpro.pipeline.gpu_coordinator:GPUProcessCoordinator.collect_results",
    "virnucpro.pipeline.gpu_coordinator:GPUProcessCoordinator.terminate_all",
    "virnucpro.pipeline.gpu_worker:gpu_worker",
    "virnucpro.pipeline.multi_gpu_inference:run_multi_gpu_inference",
    "virnucpro.pipeline.multi_gpu_inference:run_esm2_multi_gpu",
    "virnucpro.data.sequence_index:SequenceIndex.build",
    "virnucpro.data.sequence_index:get_worker_indices",
    "virnucpro.data.sequence_dataset:IndexBasedDataset",
    "virnucpro.data.collators:VarlenCollator",
    "virnucpro.data.collators:create_async_dataloader",
    "virnucpro.pipeline.async_inference:AsyncInferenceRunner",
    "virnucpro.pipeline.async_inference:InferenceResult",
    "virnucpro.telemetry.worker_logging:setup_worker_logging",
    "virnucpro.models.esm2_flash:load_esm2_model",
)
_ANY = {
    "run_id",
    "started",
    "finished",
    "host",
    "path",
    "python",
    "version",
    "torch",
    "seconds",
    "tokens_per_second",
    "attention_kernel",
    "processor",
}


def help_text(command: str) -> str:
    """Return what ``virnucpro COMMAND --help`` prints in a terminal of 100 columns."""
    from typer.testing import CliRunner

    from virnucpro.cli import command_line

    result = CliRunner().invoke(command_line(), [*command.split(), "--help"], prog_name="virnucpro", terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.output


def form_schema(name: str) -> str:
    """Return the JSON schema of a flow's parameters: the form of its deployments."""
    from prefect.utilities.callables import parameter_schema

    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    return json.dumps(parameter_schema(flow).model_dump_for_openapi(), indent=1, sort_keys=True) + "\n"


def signatures() -> str:
    """Return name, parameters and defaults of what scripts import."""
    lines = []
    for place in FIXED_NAMES:
        module, _, name = place.partition(":")
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)
        lines.append(f"{place}")
        lines += [f"    {parameter}" for parameter in inspect.signature(found).parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines)) + "\n"


def manifest_of(folder: Path) -> str:
    """Return ``run.json`` without what another machine or moment changes."""
    manifest = json.loads((folder / "run.json").read_text())

    def plain(name: str, value: object) -> object:
        if name == "processors" and value:
            return "text"
        if isinstance(value, dict):
            return {key: plain(key, item) for key, item in value.items()}
        if isinstance(value, float) or name in {"pids", "peak_memory_bytes"}:
            return "number"
        if isinstance(value, list):
            return [plain(name, item) for item in value]
        if isinstance(value, str) and (name in _ANY or re.fullmatch(r"[0-9a-f]{16,64}|\d+\.\d[\w.+]*", value)):
            return "text"
        return value

    return json.dumps(plain("", manifest), indent=1) + "\n"


def embed_manifest() -> str:
    """Return the manifest of a small embedding."""
    from virnucpro import embed_fasta
    from virnucpro.choices import DEFAULT_PROTEIN_MODEL

    with tempfile.TemporaryDirectory() as folder:
        embed_fasta(EXAMPLES / "proteins.fasta", folder, model=DEFAULT_PROTEIN_MODEL, devices="cpu", workers=1).close()
        return manifest_of(Path(folder))


def predict_manifest() -> str:
    """Return the manifest of a small prediction."""
    from virnucpro import predict_fasta

    with tempfile.TemporaryDirectory() as folder:
        predict_fasta(EXAMPLES / "contigs.fasta", folder, devices="cpu", workers=1)
        return manifest_of(Path(folder))


FACES = {
    "help.txt": lambda: "\n".join(
        f"$ virnucpro {name} --help\n{help_text(name)}" for name in (*COMMANDS, *MORE_COMMANDS)
    ),
    "form_embed.json": lambda: form_schema("embed"),
    "form_predict.json": lambda: form_schema("predict"),
    "form_train.json": lambda: form_schema("train"),
    "signatures.txt": signatures,
    "run_embed.json": embed_manifest,
    "run_predict.json": predict_manifest,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in FACES.items():
        (FOLDER / name).write_text(make())


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    main()
