"""Two workers that run a function of your own: one fails, the other embeds the rows of both."""

from pathlib import Path
from typing import Any

from virnucpro import read_embeddings
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.gpu_worker import gpu_worker
from virnucpro.pipeline.multi_gpu_inference import run_multi_gpu_inference
from virnucpro.settings import EmbeddingSettings


def unlucky(rank: int, world_size: int, results_queue: Any, *args: Any) -> None:
    """Embed as usual, but never on rank 1."""
    if rank == 1:
        raise RuntimeError("no luck today")
    gpu_worker(rank, world_size, results_queue, *args)


if __name__ == "__main__":  # workers import this file
    fasta = Path(__file__).with_name("proteins.fasta")
    model = configure_model(EmbeddingSettings(model="virnucpro-tiny-protein"), device_type="cpu")
    path, failed_ranks = run_multi_gpu_inference(fasta, "own", model, world_size=2, worker_fn=unlucky)
    print(f"{path}: {len(read_embeddings(path))} rows; failed ranks: {failed_ranks}")
