"""Probes one GPU before the plan is made, and then becomes a worker: its kernel, and how many tokens suit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from virnucpro.choices import AUTO_TOKEN_BUDGET
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.packing import tokens_of
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.gpu_worker import begin_logging, gpu_worker, load_model, own_device
from virnucpro.pipeline.hardware.device_errors import failure_of
from virnucpro.pipeline.plan.token_budget import DeviceTrials, Trial, choose_token_budget
from virnucpro.pipeline.work.own_process import failure_reported
from virnucpro.pipeline.work.warm_process import BECOMES
from virnucpro.pipeline.work.worker_process import importable_name
from virnucpro.run_layout import RunLayout

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)

SAMPLE = 512
"""Sequences of each kind (longest, typical) that blocks are made of."""
BLOCKS_PER_RANK = 4
"""Blocks that each rank should at least get, so that all of them have work until the end."""


def probe_worker(
    rank: int,
    world_size: int,
    results_queue: ReportPipe,
    index_path: str | Path,
    output_dir: str | Path,
    model_config: ModelConfig,
) -> None:
    """
    Load the model, report its attention kernel, try out budgets unless one was given, and go on as ``gpu_worker``.

    Args:
        results_queue: Takes the report: ``{'rank', 'status': 'complete', 'device_name', 'attention_kernel',
            'attention_reason', 'token_budget', 'trials', 'becomes'}``, or why it failed.

    Raises:
        SystemExit: It failed; the exit code has the class of the failure, the report the reason.
    """
    begin_logging(rank, RunLayout(Path(output_dir)), model_config, results_queue)
    with failure_reported(rank, results_queue, failure_of):
        device = own_device(model_config)
        model, tokenizer = load_model(model_config, device, results_queue)
        budget, trials = model_config.token_budget, list[Trial]()
        if budget == AUTO_TOKEN_BUDGET:
            index = SequenceIndex.open(Path(index_path))
            collator = VarlenCollator(
                tokenizer, max_residues=model_config.max_residues, in_windows=model_config.in_windows
            )
            longest, typical = (
                _token_ids(index, collator, positions) for positions in (range(len(index)), _typical(len(index)))
            )
            trial_of = DeviceTrials(model, device, longest=longest, typical=typical)
            tokens = tokens_of(
                index.lengths[:],
                max_residues=model_config.max_residues,
                letters_per_token=model_config.letters_per_token,
                in_windows=model_config.in_windows,
            )
            total = int(tokens.sum())
            longest_tokens = max(len(ids) for ids in longest)
            if model_config.in_windows:  # a sequence's windows are in one block
                longest_tokens = max(longest_tokens, int(tokens.max()))
            ranks = world_size * model_config.settings.hardware.workers_per_device
            budget, trials = choose_token_budget(
                trial_of,
                longest_tokens=longest_tokens,
                most_tokens=max(longest_tokens, total // (BLOCKS_PER_RANK * ranks)),
                resting_bytes=trial_of.resting_bytes,
                memory_bytes=trial_of.memory_bytes // model_config.settings.hardware.workers_per_device,
            )
            log.info("budget.measured", token_budget=budget, trials=len(trials))
            torch.cuda.reset_peak_memory_stats(device)
            del index, tokens, longest, typical, trial_of  # not for the rest of this process
    report = {
        "rank": rank,
        "status": "complete",
        "device_name": torch.cuda.get_device_name(device),
        "attention_kernel": model.attention.name,
        "attention_reason": model.attention.reason,
        "token_budget": budget,
        "trials": [
            {"tokens": t.tokens, "tokens_per_second": round(t.tokens_per_second), "peak_mib": t.peak_bytes >> 20}
            for t in trials
        ],
        BECOMES: ":".join(importable_name(gpu_worker)),
    }
    results_queue.put(report)
    rank, world_size, worker_args = results_queue.next_work()
    gpu_worker(rank, world_size, results_queue, *worker_args, loaded=(model, tokenizer))


def _typical(num_sequences: int) -> range:
    """Return the positions around the median length of a sorted index."""
    middle = num_sequences // 2
    return range(max(0, middle - SAMPLE // 2), num_sequences)


def _token_ids(index: SequenceIndex, collator: VarlenCollator, positions: range) -> list[torch.Tensor]:
    """Return the token ids of the first *SAMPLE* sequences at *positions*."""
    dataset = IndexBasedDataset(index, positions[:SAMPLE])
    batch = collator([dataset[number] for number in range(len(dataset))])
    return list(torch.split(batch.input_ids_T, list(batch.lengths)))
