"""PyTorch and ONNX Runtime on the texts of `gpu bench`: python rivals.py DIRECTORY... --out rivals.csv

Same work: token ids start in host memory, normalized mean-pooled embeddings end there; fp16; what is measured is the best of
several batch sizes. The next batch is enqueued before the last one's result is waited for.

torch          transformers' BertModel with SDPA, its layers compiled by torch.compile. Batch of one: a CUDA graph of that.
onnxruntime    the CUDA provider, a graph of its fused BERT operators (rival_onnx.py).

Texts of one length have no mask. The natural mix is padded to the longest text of a batch: in the order in which texts come,
as a dynamic batcher does it ("natural"), and sorted by length ("natural sorted").

What is not installed, or has no GPU, is left out and named. `--deadline` ends the measuring early; what is then missing is
named, too.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np

COLUMNS = ["contestant", "model", "texts", "batch_tokens", "sequences_per_s", "latency_p50_ms", "latency_p99_ms"]
BATCH_TOKENS = [8192, 16384, 32768, 65536]
BATCH_SIZES = [32, 128, 512]


def natural(count, median=24.0, sigma=0.8):
    """The lengths of benches/texts: log-normal, 5 to 400 tokens."""

    def length(i):
        u = (i + 0.5) * 0.618033988749895 % 1.0
        z = math.log(u / (1.0 - u)) / 1.702
        return min(max(math.floor(median * math.exp(sigma * z) + 0.5), 5), 400)

    return [length(i) for i in range(count)]


def padded_batches(lengths, size=None, tokens=None):
    """Lists of lengths: of `size` texts, or of at most `tokens` tokens with padding."""
    batches = [[]]
    for length in lengths:
        full = len(batches[-1]) == size if size else (len(batches[-1]) + 1) * length > tokens
        if batches[-1] and full:
            batches.append([])
        batches[-1].append(length)
    return batches


def ids_and_mask(lengths, vocabulary):
    """[B, S] int32 and int32, padded to the longest; the mask is None where nothing is padded."""
    ids = np.zeros((len(lengths), max(lengths)), np.int32)
    mask = np.zeros_like(ids)
    for i, length in enumerate(lengths):
        ids[i, :length] = (i * 7919 + np.arange(length) * 104729 + 1000) % vocabulary
        mask[i, :length] = 1
    return ids, None if mask.all() else mask


class Torch:
    """start() enqueues a batch and returns its result, which finish() waits for."""

    def __init__(self, directory, device):
        import torch
        import transformers

        self.torch, self.device = torch, device
        torch._dynamo.config.recompile_limit = 64
        # The pooler's weights are left out, which it would report.
        transformers.logging.set_verbosity_error()
        model = transformers.BertModel.from_pretrained(
            directory, dtype=torch.float16, attn_implementation="sdpa", add_pooling_layer=False
        )
        self.model = model.eval().to(device)
        # One layer is compiled and serves all: compiling the whole model gives nearly the same code many times more slowly.
        for layer in self.model.encoder.layer:
            layer.compile(dynamic=True)
        self.vocabulary = model.config.vocab_size

    @staticmethod
    def describe():
        import torch
        import transformers

        return f"torch {torch.__version__}, transformers {transformers.__version__}"

    def batch(self, lengths):
        ids, mask = ids_and_mask(lengths, self.vocabulary)
        host = [None if array is None else self.torch.from_numpy(array) for array in (ids, mask)]
        return [tensor.pin_memory() if tensor is not None and self.device == "cuda" else tensor for tensor in host]

    def forward(self, ids, mask):
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        if mask is None:
            pooled = states.float().mean(1)
        else:
            weights = mask.unsqueeze(2).float()
            pooled = (states * weights).sum(1) / weights.sum(1)
        return self.torch.nn.functional.normalize(pooled, dim=1)

    def start(self, batch):
        with self.torch.inference_mode():
            ids, mask = [None if tensor is None else tensor.to(self.device, non_blocking=True) for tensor in batch]
            result = self.forward(ids, mask)
            # Without pinned memory to copy to this would wait here.
            host = self.torch.empty(result.shape, dtype=result.dtype, pin_memory=self.device == "cuda")
            host.copy_(result, non_blocking=True)
            done = None
            if self.device == "cuda":
                done = self.torch.cuda.Event()
                done.record()
            return done, host

    def finish(self, started):
        done, host = started
        if done is not None:
            done.synchronize()
        return host.numpy()

    def one(self, length):
        """A function that runs a single text: a CUDA graph where there is CUDA."""
        torch = self.torch
        batch = self.batch([length])
        if self.device != "cuda":
            return lambda: self.finish(self.start(batch))
        with torch.inference_mode():
            ids = batch[0].to(self.device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.forward(ids, None)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self.forward(ids, None)

        def run():
            ids.copy_(batch[0], non_blocking=True)
            graph.replay()
            return result.cpu().numpy()

        return run


class OnnxRuntime:
    def __init__(self, directory, device):
        import onnxruntime
        import rival_onnx

        provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise RuntimeError(f"it has no {provider}")
        # The CPU provider has no fused operators in fp16.
        bert = rival_onnx.Bert(directory, np.float16 if device == "cuda" else np.float32)
        self.sessions = {}
        for masked in (False, True):
            path = directory / f"fused{'_masked' * masked}.onnx"
            rival_onnx.save(path, bert, fused=True, masked=masked)
            session = onnxruntime.InferenceSession(path, providers=[provider])
            if session.get_providers()[0] != provider:
                raise RuntimeError(f"its {provider} does not start")
            self.sessions[masked] = session
        self.vocabulary = bert.config["vocab_size"]

    @staticmethod
    def describe():
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"

    def batch(self, lengths):
        ids, mask = ids_and_mask(lengths, self.vocabulary)
        return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}

    def start(self, batch):
        return self.sessions["attention_mask" in batch].run(None, batch)[0]

    def finish(self, started):
        return started

    def one(self, length):
        batch = self.batch([length])
        return lambda: self.start(batch)


# The first has half of the time, the second what is left: where there is no ONNX Runtime, all of it.
CONTESTANTS = {"onnxruntime": OnnxRuntime, "torch": Torch}


def throughput(contestant, batches, seconds):
    """Sequences/s over about `seconds`, in whole rounds of `batches`."""
    inputs = [contestant.batch(lengths) for lengths in batches]
    for batch in inputs:
        contestant.finish(contestant.start(batch))
    begin, rounds, last = time.perf_counter(), 0, None
    while time.perf_counter() - begin < seconds or rounds < 2:
        for batch in inputs:
            started = contestant.start(batch)
            if last is not None:
                contestant.finish(last)
            last = started
        rounds += 1
    result = contestant.finish(last)
    elapsed = time.perf_counter() - begin
    if not np.isfinite(result).all():
        raise RuntimeError("its result is not finite")
    return rounds * sum(map(len, batches)) / elapsed


def latency(contestant, length, seconds):
    run = contestant.one(length)
    for _ in range(5):
        run()
    times, begin = [], time.perf_counter()
    while len(times) < 50 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return statistics.median(times), times[len(times) * 99 // 100]


def workloads(lengths, texts):
    """texts -> list of (batch tokens, batches): the ways in which it may be batched."""
    usual = min(lengths, key=lambda length: abs(length - 128))
    mix = natural(texts)
    out = {}
    for length in [usual, *(other for other in lengths if other != usual)]:
        sizes = sorted({min(tokens // length, texts) for tokens in BATCH_TOKENS})
        out[str(length)] = [(size * length, [[length] * size] * 2) for size in sizes]
        if length == usual:
            for name, ways in (
                ("natural", [padded_batches(mix, size=size) for size in BATCH_SIZES]),
                ("natural sorted", [padded_batches(sorted(mix), tokens=tokens) for tokens in BATCH_TOKENS]),
            ):
                out[name] = [(max(len(b) * max(b) for b in way), way) for way in ways]
    return out


def measure(name, directory, args, late):
    contestant = CONTESTANTS[name](directory, args.device)
    for texts, ways in workloads(args.lengths, args.texts).items():
        if late():
            print(f"  left out, no time: {texts} and what follows")
            return
        best = max((throughput(contestant, way, args.seconds), tokens) for tokens, way in ways)
        row = {"contestant": name, "model": directory.name, "texts": texts}
        row |= {"batch_tokens": best[1], "sequences_per_s": round(best[0], 2)}
        if texts.isdigit():
            p50, p99 = latency(contestant, int(texts), args.seconds)
            row |= {"latency_p50_ms": round(p50, 4), "latency_p99_ms": round(p99, 4)}
        said = f", one text {row['latency_p50_ms']} ms" if "latency_p50_ms" in row else ""
        print(f"  {texts:<14} {best[0]:>10.1f} sequences/s in batches of {best[1]} tokens{said}", flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--facts", type=Path, help="versions go there")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default="16,64,128,384,512")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--deadline", type=float, default=240, help="seconds")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this script")
    args = parser.parse_args()
    begin = time.monotonic()
    rows, facts = [], {}
    for share, (name, kind) in zip((args.deadline / 2, args.deadline), CONTESTANTS.items()):
        try:
            facts[name] = kind.describe()
            if name == "torch" and args.device == "cuda":
                import torch

                if not torch.cuda.is_available():
                    raise RuntimeError("torch sees no CUDA device")
            for directory in args.models:
                print(f"{name}, {directory.name}", flush=True)
                rows += measure(name, directory, args, lambda share=share: time.monotonic() - begin > share)
        except Exception as error:  # noqa: BLE001: a rival that fails is left out, and said so
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            facts[name] = f"left out: {reason}"
            print(f"{name}: left out: {reason}", file=sys.stderr)
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if args.facts:
        args.facts.write_text(json.dumps(facts), "utf-8")


if __name__ == "__main__":
    main()
