"""
Hand-written stand-ins for the tests: a model whose vectors identify their sequence, and workers that fail for real.

Everything here is at module level because workers are spawned and import it by name.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.settings import changed
from virnucpro.config import ModelConfig
from virnucpro.errors import ConfigurationError

HASH_WIDTH = 8


def hash_vector(sequence: str) -> np.ndarray:
    """The vector that the hash model gives *sequence*: float32 (HASH_WIDTH,), different for every sequence."""
    digest = hashlib.sha256(sequence.encode()).digest()
    return (np.frombuffer(digest, dtype="<u4").astype(np.float64) / 2**32).astype(np.float32)


class ByteTokenizer:
    """One token a letter, 0 before and 1 after."""

    def encode(self, sequences):
        ids = np.concatenate([np.concatenate([[0], np.frombuffer(s.encode(), np.uint8), [1]]) for s in sequences])
        return ids.astype(np.int64), np.array([len(s) + 2 for s in sequences], dtype=np.int32)


class HashModel:
    """Gives each packed sequence its ``hash_vector``; *before_batch* runs first, with the number of the batch."""

    hidden_dim = HASH_WIDTH

    def __init__(self, before_batch=lambda number, sequences: None):
        self.before_batch = before_batch
        self.batches = 0

    @property
    def attention(self):
        from virnucpro.models.attention import AttentionChoice

        return AttentionChoice("no attention", None, "a hash needs none")

    def __call__(self, input_ids_T, cu_seqlens, lengths):
        import torch

        bounds = np.concatenate([[0], np.cumsum(lengths)])
        assert bounds.tolist() == cu_seqlens.tolist()
        tokens = input_ids_T.numpy().astype(np.uint8)
        sequences = [bytes(tokens[a + 1 : b - 1]).decode() for a, b in itertools.pairwise(bounds.tolist())]
        self.before_batch(self.batches, sequences)
        self.batches += 1
        return torch.from_numpy(np.stack([hash_vector(sequence) for sequence in sequences]))


class SmallMemoryModel(HashModel):
    """A hash model on a device that holds *most_tokens* tokens; keeps the sizes of the batches that it was given."""

    def __init__(self, most_tokens):
        super().__init__()
        self.most_tokens = most_tokens
        self.asked = []

    def __call__(self, input_ids_T, cu_seqlens, lengths):
        import torch

        self.asked.append(len(input_ids_T))
        if len(input_ids_T) > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory, said the fake")
        return super().__call__(input_ids_T, cu_seqlens, lengths)


def load_small_memory_model(weights_path, device, *, precision="fp32"):
    """A model whose device holds as many tokens as the text file *weights_path* says."""
    return SmallMemoryModel(int(Path(weights_path).read_text())), ByteTokenizer()


def load_hash_model(weights_path, device, *, precision="fp32"):
    return HashModel(), ByteTokenizer()


def load_faulty_model(weights_path, device, *, precision="fp32"):
    """
    A hash model that fails as the JSON file *weights_path* says.

    ``rank``: which worker; ``how``: see ``fail``; ``before_batch``: when; ``times``: in how many processes (counted by
    files beside the JSON, so that a new process sees what the earlier ones did); ``poison``: sequence -> how, for
    batches that hold it, in every process; ``while_loading``: how to fail instead of giving a model; ``gate``: a file
    without which no batch is computed; ``failures_first``: how often that worker fails before the others compute
    anything, or they may have done its work before it starts; ``burn_s``: processor seconds of a batch; ``loads``:
    note beside it which process loads a model.
    """
    plan = json.loads(Path(weights_path).read_text())
    if plan.get("loads"):
        with Path(weights_path).with_suffix(".loads").open("a") as file:
            file.write(f"{os.getpid()}\n")
    slow_s = plan.get("slow_s", 0.0)
    poison, awaited = plan.get("poison", {}), plan.get("failures_first", 0)
    if "while_loading" in plan:
        fail(plan["while_loading"])

    def before_batch(number, sequences):
        if plan.get("calls"):
            with Path(weights_path).with_suffix(".calls").open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "sequences": sequences}) + "\n")
        time.sleep(slow_s)
        burnt_s = time.process_time() + plan.get("burn_s", 0)
        while time.process_time() < burnt_s:
            pass
        while "gate" in plan and not Path(plan["gate"]).exists():
            time.sleep(0.05)
        for sequence in poison.keys() & set(sequences):
            fail(poison[sequence])
        mine = multiprocessing.current_process().name == f"gpu_worker_{plan.get('rank')}"
        if mine and number == plan["before_batch"] and claim_failure(Path(weights_path), plan["times"]):
            fail(plan["how"])
        while not mine and awaited and not failure(Path(weights_path), awaited - 1).exists():
            time.sleep(0.05)

    return HashModel(before_batch), ByteTokenizer()


def load_model_that_ranks_lose(weights_path, device, *, precision="fp32"):
    """A hash model whose every batch ends the process, on as many of the first ranks as *weights_path* says."""
    rank = int(multiprocessing.current_process().name.removeprefix("gpu_worker_"))
    is_lost = rank < int(Path(weights_path).read_text())
    return HashModel((lambda number, sequences: fail("segfault")) if is_lost else (lambda *_: None)), ByteTokenizer()


def load_model_whose_device_goes(weights_path, device, *, precision="fp32"):
    """A hash model on the devices of two ranks; rank 0's is gone for good once it has computed two batches."""
    gone = Path(weights_path)

    def before_batch(number, sequences):
        if multiprocessing.current_process().name == "gpu_worker_0" and (number == 2 or gone.exists()):
            gone.touch()
            fail("device_gone")
        while number == 2 and not gone.exists():  # or the other rank has done everything
            time.sleep(0.05)

    return HashModel(before_batch), ByteTokenizer()


def load_model_whose_device_fails_slowly(weights_path, device, *, precision="fp32"):
    """A hash model whose rank 0 has a device that is gone after two batches, and takes five seconds to say so."""
    gone = Path(weights_path)

    def before_batch(number, sequences):
        if multiprocessing.current_process().name == "gpu_worker_0" and (number == 2 or gone.exists()):
            gone.touch()
            time.sleep(5)
            fail("device_gone")
        while number == 2 and not gone.exists():
            time.sleep(0.05)

    return HashModel(before_batch), ByteTokenizer()


def load_model_of_uneven_ranks(weights_path, device, *, precision="fp32"):
    """A hash model that needs as many seconds for a batch as the JSON list *weights_path* has for the rank."""
    rank = int(multiprocessing.current_process().name.removeprefix("gpu_worker_"))
    seconds = json.loads(Path(weights_path).read_text())[rank]
    return HashModel(lambda number, sequences: time.sleep(seconds)), ByteTokenizer()


def load_slow_bundled_encoder(weights_path, device, *, precision="fp32"):
    """The bundled encoder of proteins on a device that needs a fifth of a second longer for every batch."""
    from virnucpro.models.esm2_flash import load_esm2_model

    model, tokenizer = load_esm2_model(weights_path, device, precision=precision)
    compute = model.forward

    def slowly(*args):
        time.sleep(0.2)
        return compute(*args)

    model.forward = slowly
    return model, tokenizer


def load_poisoned_model(weights_path, device, *, precision="fp32"):
    """A hash model that gives one number which is not finite for the sequence *weights_path*."""
    return PoisonedModel(weights_path), ByteTokenizer()


class PoisonedModel(HashModel):
    """Gives NaN in the last column of one sequence."""

    def __init__(self, poison):
        super().__init__()
        self.poison = hash_vector(poison)

    def __call__(self, *args):
        import torch

        rows = super().__call__(*args)
        rows[(rows == torch.from_numpy(self.poison)).all(dim=1), -1] = float("nan")
        return rows


def load_overflowing_model(weights_path, device, *, precision="fp32"):
    """A hash model that overflows for the sequence *weights_path*, and does not in float32."""
    return OverflowingModel(weights_path), ByteTokenizer()


class OverflowingModel(PoisonedModel):
    def in_float32(self, *args):
        return HashModel.__call__(self, *args)


def failure(control: Path, number: int) -> Path:
    """Return the file that the process leaves which fails as *number* (from 0)."""
    return control.with_suffix(f".failed{number}")


def claim_failure(control: Path, times: int) -> bool:
    """Whether this process is one of the first *times* that get here; each leaves its pid."""
    for number in range(times):
        try:
            descriptor = os.open(failure(control, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            continue
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        return True
    return False


def fail(how: str) -> None:
    """Fail for real."""
    if how in ERRORS:
        error = ERRORS[how]()
        raise error
    DEATHS[how]()


def _memory_error():
    import torch

    return torch.OutOfMemoryError("CUDA out of memory, said the fake")


def _device_error():
    import torch

    return torch.AcceleratorError("CUDA error: an illegal memory access, said the fake")


ERRORS = {
    "raise": lambda: RuntimeError("a fault that the test asked for"),
    "refuse": lambda: ConfigurationError("a fault that the test asked for"),
    "import_error": lambda: ImportError("no such package, said the fake"),
    "device_error": _device_error,
    "device_gone": lambda: RuntimeError("CUDA error: unspecified launch failure, said the fake"),
    "memory_error": _memory_error,
}


def _die_as_for_memory():
    """What the kernel does: count the kill, in the file that the test set in place of the kernel's, and kill."""
    events = Path(os.environ["FAKE_MEMORY_EVENTS"])
    events.write_text(f"oom_kill {int(events.read_text().split()[1]) + 1}\n")
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = {
    "oom_kill": _die_as_for_memory,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "exit7": lambda: os._exit(7),
    "hang": lambda: time.sleep(3600),
    "hold_the_gil": lambda: ctypes.PyDLL(None).sleep(3600),
}


NOBODY = 65534


@contextmanager
def another_user():
    """Root reads everything; give that up for a while."""
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def hash_config(**changes) -> ModelConfig:
    """Settings for the hash model: small blocks and parts, so that little input makes many of them."""
    settings = {
        "model_name": "hash",
        "weights_path": "",
        "weights_sha256": "0" * 64,
        "hidden_dim": HASH_WIDTH,
        "loader": "tests.fakes:load_hash_model",
        "token_budget": 64,
        "sequences_per_part": 4,
    }
    return changed(ModelConfig(**settings), **changes)


def faulty_config(control: Path, plan: dict, **changes) -> ModelConfig:
    """Settings for the faulty model; ``control`` is written here and may be rewritten between runs."""
    control.write_text(json.dumps({"times": 1, "before_batch": 0, **plan}))
    return hash_config(weights_path=str(control), loader="tests.fakes:load_faulty_model", **changes)


# --- classifiers ---


def random_mlp(input_dim=20, hidden_dim=6, seed=7):
    """A classifier's module with random weights and statistics, the same every time; in training mode."""
    import torch

    from virnucpro.models.classifier import MLPClassifier

    generator = torch.Generator().manual_seed(seed)
    module = MLPClassifier(input_dim, hidden_dim)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if name == "bn1.running_var":
                tensor.abs_().add_(0.1)
    return module


def classifier_card(module, **changes):
    """The card of a classifier on two models of 12 and 8 columns, or of other widths."""
    from safetensors.torch import save

    from virnucpro.models.classifier_files.card import ClassifierCard, Encoder

    width = module.hidden_layer.in_features
    tensors = {name: tensor for name, tensor in module.state_dict().items() if "num_batches" not in name}
    settings = {
        "name": "mine",
        "chunk_nt": 500,
        "dna_model": Encoder(name="dna-model", sha256="d" * 64, hidden_dim=width - 8),
        "protein_model": Encoder(name="protein-model", sha256=None, hidden_dim=8),
        "hidden_dim": module.hidden_layer.out_features,
        "weights_sha256": hashlib.sha256(save(tensors)).hexdigest(),
    }
    return ClassifierCard(**{**settings, **changes})


def write_classifier(folder, module, **changes):
    """Write a classifier's folder; return its card."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    card = classifier_card(module, **changes)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if "num_batches" not in name}
    (folder / "model.safetensors").write_bytes(save(tensors))
    (folder / "card.json").write_text(card.to_json())
    return card


def one_split(number, threshold):
    """Boosted trees of one node: an input above the threshold is for a virus."""
    import numpy as np

    from virnucpro.models.contigs.boosted_trees import BoostedTrees

    return BoostedTrees(
        input_N=np.array([number], dtype=np.int16),
        threshold_N=np.array([threshold]),
        children_N2=np.array([[~0, ~1]], dtype=np.int32),
        roots_T=np.array([0], dtype=np.int32),
        values_L=np.array([-0.5, 0.5]),
    )


def add_contig_model(folder, card, *, seed=7):
    """Write a random contig model, which uses embeddings, into a classifier's folder; return the card with it."""
    from dataclasses import replace

    import numpy as np

    from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME, ContigModelCard
    from virnucpro.models.contigs.contig_model import ContigWeights, Layer
    from virnucpro.models.contigs.sequence_features import TABLES, feature_count

    chooser, groups, hidden = np.random.default_rng(seed), 2, 40  # so many that none says nothing
    inputs = feature_count(groups) + card.input_dim + 2
    widths = [(hidden, inputs), (groups, hidden)]
    layers = [
        Layer(*(chooser.normal(0, 0.05, shape).astype(np.float32) for shape in ((out, into), (out,))))
        for out, into in widths
    ]
    weights = ContigWeights(
        trees=one_split(0, 0.01),
        log_odds={
            table.name: chooser.integers(-40, 40, (table.slots, groups), dtype=np.int8, endpoint=True)
            for table in TABLES
        },
        is_viral_G=np.array([True, False]),
        mean_I=np.zeros(inputs, dtype=np.float32),
        deviation_I=np.full(inputs, 0.5, dtype=np.float32),
        members=(tuple(layers),),
        temperature=0.5,
    )
    data = weights.to_bytes()
    (folder / CONTIG_WEIGHTS_NAME).write_bytes(data)
    card = replace(card, contig_model=ContigModelCard(weights_sha256=hashlib.sha256(data).hexdigest()))
    (folder / "card.json").write_text(card.to_json())
    return card


# --- worker functions ---


def report_environment(rank, world_size, results_queue, *args):
    """Say what this process sees."""
    import sys

    results_queue.put(
        {
            "rank": rank,
            "status": "complete",
            "world_size": world_size,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "trim": os.environ.get("MALLOC_TRIM_THRESHOLD_"),
            "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
            "allocator": [os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("CUDA_", "")],
            "pid": os.getpid(),
            "process_name": multiprocessing.current_process().name,
            "modules": [name for name in ("torch", "prefect", "esm") if name in sys.modules],
            "args": list(args),
            "started_s": time.time(),
        }
    )


def fail_on_rank(rank, world_size, results_queue, failing_rank, how):
    """Fail on one rank, succeed on the others."""
    if rank == failing_rank:
        fail(how)
    results_queue.put({"rank": rank, "status": "complete", "pid": os.getpid()})


def fail_until_attempt(rank, world_size, results_queue, folder, how, succeeding_attempt):
    """Fail until the given attempt; every attempt leaves its pid in *folder*."""
    number = len(list(Path(folder).glob(f"{rank}_*")))
    (Path(folder) / f"{rank}_{number}").write_text(str(os.getpid()))
    if number + 1 < succeeding_attempt:
        fail(how)
    results_queue.put({"rank": rank, "status": "complete", "pid": os.getpid()})


def report_and_exit(rank, world_size, results_queue, code):
    """Report that everything is done, and exit with *code* all the same."""
    results_queue.put({"rank": rank, "status": "complete", "pid": os.getpid()})
    raise SystemExit(code)


def end_without_a_word(rank, world_size, results_queue):
    """Exit with 0 and no report."""


def sleep_long(rank, world_size, results_queue, seconds=3600):
    time.sleep(seconds)


def ignore_sigterm(rank, world_size, results_queue):
    """Say that we are ready, and stay."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    results_queue.put({"kind": "heartbeat", "ready": True})
    time.sleep(3600)


def sleep_after_report_of_start(rank, world_size, results_queue, folder):
    (Path(folder) / f"pid_{rank}").write_text(str(os.getpid()))
    time.sleep(3600)


def flood(rank, world_size, results_queue, messages):
    for number in range(messages):
        results_queue.put({"kind": "progress", "sequences": number, "tokens": number})
    results_queue.put({"rank": rank, "status": "complete", "messages": messages})


def flood_without_end(rank, world_size, results_queue):
    """Write messages as long as a pipe takes whole, until somebody kills this process."""
    for number in itertools.count():
        padding = "x" * (3900 + number % 100)
        results_queue.put({"kind": "progress", "sequences": number, "tokens": number, "padding": padding})


def send_too_much(rank, world_size, results_queue, *args):
    results_queue.put({"rank": rank, "status": "complete", "blob": "x" * 8_000_000})


def fail_with_configuration_error(rank, world_size, results_queue, *args):
    from virnucpro.errors import ConfigurationError

    raise ConfigurationError("this cannot work")


def always_exit7(rank, world_size, results_queue, *args):
    os._exit(7)


def gpu_worker_that_never_starts_on_rank_0(rank, world_size, results_queue, *args):
    if rank == 0:
        time.sleep(3600)
    from virnucpro.pipeline.gpu_worker import gpu_worker

    gpu_worker(rank, world_size, results_queue, *args)


def fake_probe(rank, world_size, results_queue, index_path, output_dir, model_config):
    """Report what the JSON file ``weights_path`` has for this rank, or fail as it says; note that we were asked."""
    from virnucpro.errors import ConfigurationError

    control = Path(model_config.weights_path)
    claim_failure(control, 99)
    found = json.loads(control.read_text())[rank]
    if "fail" in found:
        fail(found["fail"])
    if "refuse" in found:
        raise ConfigurationError(found["refuse"])
    budget = model_config.token_budget or found["token_budget"]
    results_queue.put(
        {
            "rank": rank,
            "status": "complete",
            "device_name": f"GPU of rank {rank} seen as {os.environ['CUDA_VISIBLE_DEVICES']}",
            "attention_kernel": found.get("kernel", "varlen_attn"),
            "attention_reason": "the test says so",
            "token_budget": budget,
            "trials": [{"tokens": budget, "tokens_per_second": 1000, "peak_mib": 10}],
        }
    )


def disk_full_on_rank_1(rank, world_size, results_queue, *args):
    _embed_except_on_rank_1("cannot_write", "No space left on device", rank, world_size, results_queue, *args)


def broken_device_on_rank_1(rank, world_size, results_queue, *args):
    _embed_except_on_rank_1("configuration", "this device is broken", rank, world_size, results_queue, *args)


def _embed_except_on_rank_1(failure, error, rank, world_size, results_queue, *args):
    if rank == 1:
        results_queue.put({"rank": rank, "status": "failed", "error": error, "failure": failure})
        raise SystemExit(1)
    from virnucpro.pipeline.gpu_worker import gpu_worker

    gpu_worker(rank, world_size, results_queue, *args)


# --- processes around one embedding cache ---


def put_forever(folder, space, seed, max_bytes):
    """Put hash-like rows into a cache until somebody kills this process."""
    from virnucpro.store.embedding_cache import EmbeddingCache

    chooser = np.random.default_rng(seed)
    with EmbeddingCache(Path(folder), space, max_bytes=max_bytes) as cache:
        while True:
            cache.put(*cache_rows(chooser.integers(0, 20_000, size=200)))


def put_and_get(folder, space, seed, max_bytes, rounds, results):
    """Put and get rows of a common pool; send how many came back, and fail on a wrong one."""
    from virnucpro.store.embedding_cache import EmbeddingCache

    chooser = np.random.default_rng(seed)
    served = 0
    with EmbeddingCache(Path(folder), space, max_bytes=max_bytes) as cache:
        for _ in range(rounds):
            hashes, rows = cache_rows(chooser.integers(0, 2_000, size=50))
            found = cache.get(hashes)
            if found is None:
                cache.put(hashes, rows)
            else:
                assert found.tobytes() == rows.tobytes()
                served += len(found)
    results.put(served)


def cache_rows(numbers, width=32):
    """Hashes uint8 (n, 16) and rows float32 (n, width) that belong to the distinct ones of *numbers*."""
    numbers = np.unique(numbers)
    digests = [hashlib.sha256(str(number).encode()).digest() for number in numbers.tolist()]
    hashes = np.frombuffer(b"".join(digest[:16] for digest in digests), dtype=np.uint8).reshape(-1, 16)
    first = np.stack([np.frombuffer(digest, dtype="<u4") for digest in digests]).astype(np.float32)
    return hashes, np.tile(first, (1, width // 8)) + np.arange(width, dtype=np.float32)


def gpu_worker_that_reads_ahead(rank, world_size, results_queue, *args):
    """Work as on a GPU: another thread asks for the batches, a few ahead of the device."""
    from virnucpro.pipeline import async_inference
    from virnucpro.pipeline.gpu_worker import gpu_worker

    run = async_inference.AsyncInferenceRunner.run

    def run_ahead(self, loader, **settings):
        return run(self, async_inference._made_ahead(loader), **settings)

    async_inference.AsyncInferenceRunner.run = run_ahead
    gpu_worker(rank, world_size, results_queue, *args)


def gpu_worker_after_an_edit(rank, world_size, results_queue, *args):
    """Work as usual, after the input has been changed as ``EDIT_INPUT`` (edit:path) says."""
    from tests.faults import test_input_changes
    from virnucpro.pipeline.gpu_worker import gpu_worker

    edit, path = os.environ["EDIT_INPUT"].split(":", 1)
    getattr(test_input_changes, edit)(Path(path))
    gpu_worker(rank, world_size, results_queue, *args)
