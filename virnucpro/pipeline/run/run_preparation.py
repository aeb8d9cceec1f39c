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
    Preparation,
    about_indexed,
    ensure_index,
    prepare,
    release_space,
    start_from_scratch,
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
        """Return what decides about failures of this start of the run, and notifies *telemetry*."""
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
        model_config: What to compute; its token budget is a request.
        devices: One a rank, or a claim of them, which is waited for unless the folder is finished.
        probe_fn: What a process on each GPU runs to find its attention kernel and token budget.
        probe_elsewhere: Does that where the GPUs are on other hosts, from index, folder and what to compute.
        result_form: What the rows are written into; ``auto`` keeps the form of the folder's earlier run.

    Raises:
        BadInputError: The input cannot be used; names every problem.
        SettingsChangedError: The folder holds a run of other input or settings.
        OutputError: The folder cannot be written, or the run does not fit its disk.
        ConfigurationError: A GPU cannot be used.
        StoppedError: *stop* was set.
    """
    kind = _EmbeddingPreparation(
        run_id=run_id,
        layout=RunLayout(Path(output_dir)),
        inputs=fasta_files,
        model_config=model_config,
        claim=DeviceClaim.of(devices),
        result_form=require_form(result_form),
        probe_fn=probe_fn,
        probe_elsewhere=probe_elsewhere,
        stop=stop,
    )
    manifest, index = prepare(kind, restart=restart)
    if index is None and not content_is_intact(kind.layout.index):  # verify needs it
        kind.read_input()
    return PreparedRun(
        run_id=run_id,
        output_dir=kind.layout.output_dir,
        model_config=replace(kind.model_config, token_budget=manifest.plan["token_budget"]),
        devices=kind.claim.choice.candidates if index is None else tuple(kind.claim.devices()),
        num_blocks=manifest.plan["blocks"],
        already_complete=index is None,
        result_form=kind.result_form,
    )


@dataclass(kw_only=True)
class _EmbeddingPreparation(Preparation[RunManifest, SequenceIndex]):
    manifest_type = RunManifest

    run_id: str
    layout: RunLayout
    inputs: Sequence[str | Path]
    model_config: ModelConfig
    claim: DeviceClaim
    result_form: ResultForm
    probe_fn: WorkerFunction
    probe_elsewhere: Callable[[str, str, ModelConfig], list[DeviceProbe]] | None
    stop: threading.Event | None

    def earlier(self, *, restart: bool) -> RunManifest | None:
        """See ``Preparation``; without a row in the folder, another start may do as it likes."""
        layout = self.layout
        keeps = existing_results(layout, is_partial=False) or layout.shards() or part_paths(layout.parts_dir)
        is_kept = restart or keeps or not layout.manifest.exists() or "kind" in read_object(layout.manifest)
        return super().earlier(restart=restart) if is_kept else None

    def adopt(self, earlier: RunManifest | None) -> None:
        if earlier is None:
            return
        model_config = self.model_config
        asked = model_config.token_budget
        budget = earlier.settings["token_budget"] if asked == AUTO_TOKEN_BUDGET else asked
        kernel = earlier.settings.get("attention_kernel", "")
        self.model_config = replace(model_config, token_budget=budget, attention_kernel=kernel)
        if self.result_form is ResultForm.AUTO:
            self.result_form = require_form(earlier.result_form)
        earlier.settings["result_form"] = str(earlier.result_form)

    def read_input(self) -> SequenceIndex:
        return ensure_index(self.layout, self.layout.index, self.inputs, self.model_config.input_rules)

    def start_from_scratch(self, earlier: RunManifest, source: SequenceIndex) -> None:
        del earlier
        start_from_scratch(self.layout, index=source)

    def foreign(self, earlier: RunManifest | None) -> list[Path]:
        del earlier
        return unknown_results(self.layout)

    def settings(self, earlier: RunManifest) -> dict[str, Any]:
        budget = max(self.model_config.token_budget, earlier.plan["longest_sequence_tokens"])
        return self._settings(replace(self.model_config, token_budget=budget))

    def is_finished(self, earlier: RunManifest) -> bool:
        result = result_of(self.layout, earlier.result_form, is_partial=False)
        if earlier.state != "complete" or result.name_of(result.proof) not in earlier.files:
            return False
        rules = self.model_config.settings.sequences
        if rules.long is LongPolicy.ERROR and earlier.counts.get("truncated"):
            return False  # indexing names the sequences that are too long
        if earlier.counts.get("records") == 0 and not rules.allow_empty:
            return False  # indexing reports the empty input
        return result.proof.is_file() and result.is_intact(earlier.files)

    def begin(self, source: SequenceIndex, earlier: RunManifest | None) -> RunManifest:
        """See ``Preparation``: probe GPUs, wait for the devices, and reserve the space of the result first."""
        index, layout, claim = source, self.layout, self.claim
        durable.remove_tree(layout.shared_rows_dir)  # of an earlier start
        warn_of_dna(index)
        probes = earlier.plan.get("probes", []) if earlier is not None else self._probed(index)
        budget = _tokens_needed(index, self.model_config, self.model_config.token_budget or DEFAULT_TOKEN_BUDGET)
        config = self.model_config = replace(self.model_config, token_budget=budget)
        self.result_form = choose_result_form(self.result_form, num_rows=len(index), hidden_dim=config.hidden_dim)
        settings = self._settings(config)
        if earlier is not None:
            self.refuse_changes(earlier, settings)
        plan = make_plan(index, config, device_type=claim.type)
        devices = [device.label for device in claim.devices()]
        take_space(layout, index, hidden_dim=config.hidden_dim, result_form=self.result_form)
        log.info("input.indexed", sequences=len(index), token_budget=budget)
        manifest = RunManifest.begin(
            self.run_id,
            inputs=about_indexed(index),
            settings=settings,
            plan={
                "fingerprint": plan.fingerprint,
                "token_budget": plan.token_budget,
                "blocks": len(plan),
                "sequences": len(plan.positions),
                "tokens": int(plan.tokens.sum()),
                "longest_sequence_tokens": _tokens_needed(index, config, 0),
                "probes": probes,
            },
            devices=devices,
            ranks=[{"rank": rank, "device": device, "state": "running"} for rank, device in enumerate(devices)],
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
        return manifest

    def _probed(self, index: SequenceIndex) -> list[dict[str, Any]]:
        """Find the attention kernel and token budget of GPUs; return what ``run.json`` holds of it."""
        claim = self.claim
        if claim.type != "cuda" or not len(index):
            return []
        args = (str(self.layout.index), str(self.layout.output_dir), self.model_config)
        if self.probe_elsewhere is not None:
            probes = self.probe_elsewhere(*args)
        else:
            least = claim.choice.least
            probes = probe_devices(
                claim.devices(), args, probe_fn=self.probe_fn, stop=self.stop, least=least, run_id=self.run_id
            )
            claim.keep({probe.device for probe in probes})
        self.model_config = replace(
            self.model_config,
            token_budget=min(probe.token_budget for probe in probes),  # one for all: the plan knows no ranks
            attention_kernel=KERNEL_SEPARATOR.join(sorted({probe.attention_kernel for probe in probes})),
        )
        return [asdict(probe) for probe in probes]

    def _settings(self, model_config: ModelConfig) -> dict[str, Any]:
        decisive = {"device_type": self.claim.type, **computing_versions(), "result_form": str(self.result_form)}
        return {**model_config.result_settings(), **decisive}


def _tokens_needed(index: SequenceIndex, model_config: ModelConfig, budget: int) -> int:
    """Return *budget*, or the tokens of the longest sequence where these are more."""
    return resolve_token_budget(
        budget,
        index.lengths[:],
        max_residues=model_config.max_residues,
        letters_per_token=model_config.letters_per_token,
        in_windows=model_config.in_windows,
    )
