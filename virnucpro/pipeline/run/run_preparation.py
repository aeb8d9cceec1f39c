"""
What happens before any worker of an embedding run starts: index the input, make the plan, see what the folder holds.

The token budget is resolved here, once for the life of the folder: as given, as the folder's earlier run recorded it,
as a probe of the GPUs finds it, or the committed number of CPUs.

The outcome is a ``PreparedRun``: paths and settings only, small enough for a task's argument. Index and plan are
opened again from it wherever they are needed; both take milliseconds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.choices import AUTO_TOKEN_BUDGET, DEFAULT_TOKEN_BUDGET, KERNEL_SEPARATOR, LongPolicy, ResultForm
from virnucpro.config import ModelConfig, computing_versions
from virnucpro.data.index.file import content_is_intact
from virnucpro.data.packing import BlockPlan, make_plan, resolve_token_budget
from virnucpro.data.sequence_dataset import warn_of_dna
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import OutputError
from virnucpro.pipeline.blocks.finished_blocks import BlockUnits
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.plan.budget_probe import PROBE_WORKER, probe_devices
from virnucpro.pipeline.run.run import (
    about_indexed,
    ensure_index,
    is_same_input,
    refuse_foreign_files,
    refuse_other_settings,
    release_space,
    start_from_scratch,
    sweep,
    take_space,
    unknown_results,
)
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.run_layout import RunLayout
from virnucpro.store.manifest import RunManifest, read_object
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import choose_result_form, existing_results, require_form, result_of
from virnucpro.telemetry.snapshot import WorkFacts
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.config import RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.plan.budget_probe import DeviceProbe
    from virnucpro.pipeline.work.units import Why
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.work_telemetry import WorkTelemetry

log = structlog.get_logger(__name__)

GPU_WORKER = "virnucpro.pipeline.gpu_worker:gpu_worker"
"""By name, so that the parent does not import the framework."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    task: ClassVar[str] = "embed_shard"
    worker_fn: ClassVar[WorkerFunction] = GPU_WORKER
    is_small: ClassVar[bool] = False

    run_id: str
    """Unique to this start."""
    output_dir: Path
    model_config: ModelConfig
    """With the token budget resolved, and the attention kernels of GPUs."""
    devices: tuple[Device, ...]
    """One a rank; where everything is done, those that might have been taken."""
    num_blocks: int
    already_complete: bool
    """The folder holds the finished result of this very run."""
    result_form: ResultForm
    """Any but ``auto``."""

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.output_dir)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def worker_args(self) -> tuple[Any, ...]:
        """What ``gpu_worker`` gets after the pipe."""
        return (str(self.layout.index), str(self.output_dir), self.model_config)

    def recovery(self, limits: RunLimits, telemetry: WorkTelemetry) -> Recovery:
        """Return what decides about failures of this start of the run, and tells *telemetry*."""
        ranks, blocks = telemetry.ranks, self.num_blocks
        return Recovery(ranks, num_blocks=blocks, limits=limits, run_id=self.run_id, observer=telemetry)

    def compute_here(self, recovery: Recovery, stop: threading.Event) -> None:
        """Not done: a model is loaded in a process of its own."""
        raise NotImplementedError

    def open_units(self) -> BlockUnits:
        return BlockUnits(self.layout, self.plan(self.open_index()))

    def more(self, quarantined: Mapping[int, Why], telemetry: WorkTelemetry) -> range:
        """Return nothing: all blocks are known from the beginning."""
        del quarantined, telemetry
        return range(0)

    def facts(self) -> WorkFacts:
        """Return what telemetry shows of the run."""
        index = self.open_index()
        plan = self.plan(index)
        block_rows = plan.rows(index.copied)
        index.release_pages()
        return WorkFacts(
            run_id=self.run_id,
            model=self.model_config.model_name,
            precision=str(self.model_config.precision),
            token_budget=plan.token_budget,
            devices=tuple((device.label, device.token) for device in self.devices),
            host=host_name(),
            layout=self.layout,
            block_tokens=plan.tokens,
            block_rows=block_rows,
            rows_of=index.rows_of,
            records=index.num_records,
            copies=len(index) - len(plan.positions),
            skipped=index.num_skipped,
        )

    def missing_of_blocks(self, positions: IntArray) -> IntArray:
        """Return how many of the records at index *positions*, copies among them, are of each block; int64 (B,)."""
        index = self.open_index()
        plan = self.plan(index)
        return np.bincount(plan.blocks_of(index.representatives[positions]), minlength=len(plan))

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.index)

    def plan(self, index: SequenceIndex) -> BlockPlan:
        return make_plan(index, self.model_config, device_type=self.devices[0].type)


def prepare_run(
    fasta_files: Sequence[str | Path],
    output_dir: str | Path,
    model_config: ModelConfig,
    devices: DeviceClaim | Sequence[Device],
    *,
    run_id: str,
    probe_fn: WorkerFunction = PROBE_WORKER,
    probe_elsewhere: Callable[[str, str, ModelConfig], list[DeviceProbe]] | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
    result_form: ResultForm = ResultForm.SINGLE,
) -> PreparedRun:
    """
    Index the input, make the plan, and open or resume the manifest. The caller holds the folder's lock.

    Args:
        fasta_files: The input, in the order of the result.
        model_config: What to compute; its token budget is a request.
        devices: One a rank, or a claim of them, which is waited for unless the folder is finished.
        run_id: Unique to this start.
        probe_fn: What a process on each GPU runs to find its attention kernel and token budget.
        probe_elsewhere: Does that where the GPUs are on other hosts, from index, folder and what to compute.
        stop: Set it to give up while GPUs are probed.
        restart: Remove what the folder holds of earlier runs first.
        result_form: What the rows are written into; ``auto`` keeps the form of the folder's earlier run.

    Raises:
        BadInputError: The input cannot be used; names every problem.
        SettingsChangedError: The folder holds a run of other input or settings.
        OutputError: The folder cannot be written, or the run does not fit its disk.
        ConfigurationError: A GPU cannot be used.
        StoppedError: *stop* was set.
    """
    require_form(result_form)
    layout = RunLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)

    def indexed() -> SequenceIndex:
        return ensure_index(layout, layout.index, fasta_files, model_config.input_rules)

    def probed(*args: Any) -> list[DeviceProbe]:
        found = probe_devices(claim.devices(), args, probe_fn=probe_fn, stop=stop, least=claim.choice.least)
        claim.keep({probe.device for probe in found})
        return found

    if restart and layout.manifest.exists():
        RunManifest.read(layout.manifest)
        start_from_scratch(layout, index=indexed())
    earlier = _earlier_manifest(layout)
    if earlier is not None:
        model_config = _as_recorded(model_config, earlier)
        result_form = require_form(earlier.result_form if result_form is ResultForm.AUTO else result_form)
        earlier.settings["result_form"] = str(earlier.result_form)
        expected = _expected_settings(model_config, earlier, claim.type, result_form)
        same = is_same_input(layout.output_dir, earlier, fasta_files, expected)
        if same and _finished_as_asked(layout, earlier, model_config, expected):
            sweep(layout)
            if not content_is_intact(layout.index):  # verify needs it
                indexed()
            return PreparedRun(
                run_id=run_id,
                output_dir=layout.output_dir,
                model_config=replace(model_config, token_budget=earlier.plan["token_budget"]),
                devices=claim.choice.candidates,
                num_blocks=earlier.plan["blocks"],
                already_complete=True,
                result_form=result_form,
            )
    index = indexed()
    sweep(layout)
    durable.remove_tree(layout.shared_rows_dir)  # of an earlier start
    warn_of_dna(index)
    probes: list[dict[str, Any]] = earlier.plan.get("probes", []) if earlier is not None else []
    if earlier is None and claim.type == "cuda" and len(index):
        found = (probe_elsewhere or probed)(str(layout.index), str(layout.output_dir), model_config)
        model_config = replace(
            model_config,
            token_budget=min(probe.token_budget for probe in found),  # one for all: the plan knows no ranks
            attention_kernel=KERNEL_SEPARATOR.join(sorted({probe.attention_kernel for probe in found})),
        )
        probes = [asdict(probe) for probe in found]
    budget = _tokens_needed(index, model_config, model_config.token_budget or DEFAULT_TOKEN_BUDGET)
    model_config = replace(model_config, token_budget=budget)
    result_form = choose_result_form(result_form, num_rows=len(index), hidden_dim=model_config.hidden_dim)
    settings = _settings(model_config, claim.type, result_form)
    if earlier is not None:
        refuse_other_settings(layout.output_dir, earlier, settings)
    return _begin(layout, index, model_config, claim, run_id, result_form, settings, probes)


def _begin(
    layout: RunLayout,
    index: SequenceIndex,
    model_config: ModelConfig,
    claim: DeviceClaim,
    run_id: str,
    result_form: ResultForm,
    settings: dict[str, Any],
    probes: list[dict[str, Any]],
) -> PreparedRun:
    """Wait for the devices, reserve the space of the result, and write the manifest of a run that is to compute."""
    plan = make_plan(index, model_config, device_type=claim.type)
    run = PreparedRun(
        run_id=run_id,
        output_dir=layout.output_dir,
        model_config=model_config,
        devices=tuple(claim.devices()),
        num_blocks=len(plan),
        already_complete=False,
        result_form=result_form,
    )
    take_space(layout, index, hidden_dim=model_config.hidden_dim, result_form=result_form)
    log.info("input.indexed", sequences=len(index), token_budget=model_config.token_budget)
    manifest = RunManifest.begin(
        run_id,
        inputs=about_indexed(index),
        settings=settings,
        plan={
            "fingerprint": plan.fingerprint,
            "token_budget": plan.token_budget,
            "blocks": len(plan),
            "sequences": len(plan.positions),
            "tokens": int(plan.tokens.sum()),
            "longest_sequence_tokens": _tokens_needed(index, model_config, 0),
            "probes": probes,
        },
        devices=[device.label for device in run.devices],
        ranks=[{"rank": rank, "device": device.label, "state": "running"} for rank, device in enumerate(run.devices)],
        counts={"records": index.num_records, **index.counts},
    )
    try:
        manifest.write(layout.manifest)
    except OutputError:  # which may come when it has its name already
        manifest.state = "failed"
        with suppress(OutputError):
            release_space(layout)
            manifest.write(layout.manifest)
        raise
    return run


def _tokens_needed(index: SequenceIndex, model_config: ModelConfig, budget: int) -> int:
    """Return *budget*, or the tokens of the longest sequence where these are more."""
    return resolve_token_budget(
        budget,
        index.lengths[:],
        max_residues=model_config.max_residues,
        letters_per_token=model_config.letters_per_token,
        in_windows=model_config.in_windows,
    )


def _earlier_manifest(layout: RunLayout) -> RunManifest | None:
    """Return the manifest of work that is worth keeping, None where there is none."""
    if not layout.manifest.exists():
        refuse_foreign_files(unknown_results(layout))
        return None
    keeps = existing_results(layout, is_partial=False) or layout.shards() or part_paths(layout.parts_dir)
    if keeps or "kind" in read_object(layout.manifest):  # an embedding run's has no such key: reading it says so
        return RunManifest.read(layout.manifest)
    return None


def _as_recorded(model_config: ModelConfig, earlier: RunManifest) -> ModelConfig:
    """Take over what the earlier run of the folder found out about its devices."""
    asked = model_config.token_budget
    budget = earlier.settings["token_budget"] if asked == AUTO_TOKEN_BUDGET else asked
    return replace(model_config, token_budget=budget, attention_kernel=earlier.settings.get("attention_kernel", ""))


def _finished_as_asked(
    layout: RunLayout, earlier: RunManifest, model_config: ModelConfig, expected: dict[str, Any]
) -> bool:
    """Whether the folder holds the whole, undamaged result of the settings *expected*; refuses other ones."""
    result = result_of(layout, earlier.result_form, is_partial=False)
    if earlier.state != "complete" or result.name_of(result.proof) not in earlier.files or not result.proof.is_file():
        return False
    if model_config.settings.sequences.long is LongPolicy.ERROR and earlier.counts.get("truncated"):
        return False  # indexing names the sequences that are too long
    if earlier.counts.get("records") == 0 and not model_config.settings.sequences.allow_empty:
        return False  # indexing says that there is nothing
    refuse_other_settings(layout.output_dir, earlier, expected)
    return result.is_intact(earlier.files)


def _expected_settings(
    model_config: ModelConfig, earlier: RunManifest, device_type: str, result_form: ResultForm
) -> dict[str, Any]:
    """Return the settings as they will be if the input is the earlier run's."""
    budget = max(model_config.token_budget, earlier.plan["longest_sequence_tokens"])
    return _settings(replace(model_config, token_budget=budget), device_type, result_form)


def _settings(model_config: ModelConfig, device_type: str, result_form: ResultForm) -> dict[str, Any]:
    """Return everything that decides the bytes of the result."""
    decisive = {"device_type": device_type, **computing_versions(), "result_form": str(result_form)}
    return {**model_config.result_settings(), **decisive}
