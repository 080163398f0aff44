"""What token budgets do for short texts among long ones, in the real tritonserver on this machine.

    make install && .venv/bin/python benches/tail_latency.py

32 connections send all-MiniLM-L6-v2 texts of which 95 % have up to 64 tokens and 5 % about 500, each waiting for its
answer before it sends the next. Three variants of the same build:

  neither    no batchstrategy.so, and a budget that nothing reaches: what waits is one pass, answered at its end
  re-split   no batchstrategy.so, but passes of max_batch_tokens out of all that Triton has handed over, short texts
             first; each request is answered when its last row is done
  batcher    with batchstrategy.so, which also keeps Triton from batching more than the budget

Each runs at every max_batch_size and queue delay of the grid, `--rounds` times in turn, so that what else the machine
does hits all alike. A point is the median of its rounds. The best point of `neither` is the one with the lowest p99 of
the short texts; that of another variant has the lowest among its points with at least 95 % of the throughput there. The
next table compares the variants point by point: what a user has who did not search the grid. The last one has the means
over all runs, where single ones matter least.

The connections are never idle, so the mean latency of all texts is their number over the throughput, whatever is done:
the p99 of short texts can fall to that mean, and below it only by what the long ones wait longer. With `--rate` texts
come at random times instead, so many a second: a server below its capacity.

Prints tables, and writes benches/results/tail_latency.csv, a line for each run.
"""

import argparse
import csv
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "served"))

import closed_loop  # noqa: E402  (tests/served)
import harness  # noqa: E402
import repository  # noqa: E402

SHORT_TOKENS, LONG_TOKENS, MAX_LENGTH = 64, (480, 512), 512
LONG_PART = 0.05
# As many texts as there are different ones; they are sent in turn.
TEXTS = 2000
VARIANTS = ("neither", "re-split", "batcher")
SIZES, DELAYS = (8, 16, 32, 64), (0, 1000)
# No batch is larger: 64 rows of 512 tokens.
NO_BUDGET = 1 << 20
COLUMNS = {
    "throughput": "texts/s",
    "short_p50_ms": "short p50 ms",
    "short_p99_ms": "short p99 ms",
    "long_p50_ms": "long p50 ms",
    "long_p99_ms": "long p99 ms",
    "executions": "executions",
    "passes": "passes",
    "tokens_per_pass": "tokens a pass",
}


def words():
    table = ROOT / "model_repo" / "sentiment" / "sentences" / "train.tsv"
    return " ".join(line.split("\t", 1)[1] for line in table.read_text("utf-8").splitlines()).split()


def make_texts(server, model, seed=20):
    """`TEXTS` pairs of a text and whether it is long, shuffled. The server counts the tokens."""
    rng, source = random.Random(seed), words()
    source *= 2

    def pieces(count, least, most, wanted):
        texts = []
        while len(texts) < count:
            lengths = [rng.randint(least, most) for _ in range(100)]
            starts = [rng.randrange(len(source) - most) for _ in lengths]
            new = [" ".join(source[start : start + length]) for start, length in zip(starts, lengths)]
            tokens = server.infer(model, new, ["TOKEN_COUNT"])["TOKEN_COUNT"].ravel()
            texts += [(text, int(count)) for text, count in zip(new, tokens) if wanted(count)]
        return texts[:count]

    many = round(TEXTS * LONG_PART)
    long = pieces(many, 360, 440, lambda tokens: LONG_TOKENS[0] <= tokens < LONG_TOKENS[1])
    short = pieces(TEXTS - many, 2, 55, lambda tokens: tokens <= SHORT_TOKENS)
    for name, texts in (("short", short), ("long", long)):
        counts = [tokens for _, tokens in texts]
        print(f"{len(counts)} {name} texts of {min(counts)} to {max(counts)} tokens, {statistics.mean(counts):.0f} on average")
    texts = [(text, False) for text, _ in short] + [(text, True) for text, _ in long]
    rng.shuffle(texts)
    return texts


def add_models(models, options):
    """A model for each point; all share the file of the weights. Returns (variant, size, delay) -> name."""
    instances = f"instance_group [{{ count: {options.instances} kind: KIND_CPU }}]" if options.instances else ""
    names = {}
    for variant in options.variants:
        for size in options.sizes:
            for delay in options.delays:
                name = f"{variant.replace('-', '')}_{size}_{delay}"
                parameters = {"max_length": MAX_LENGTH}
                directory = models.add(name, "minilm").parent
                if variant == "neither":
                    parameters["max_batch_tokens"] = NO_BUDGET
                elif options.budget:
                    parameters["max_batch_tokens"] = options.budget
                if variant == "batcher":
                    parameters["TRITON_BATCH_STRATEGY_PATH"] = directory / "batchstrategy.so"
                    shutil.copy(harness.BATCHER, directory)
                batching = f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}"
                models.configure(name, parameters, f"max_batch_size: {size} {instances} {batching}")
                names[variant, size, delay] = name
    return names


def control(server, action, model):
    status, answer = server.request("POST", f"/v2/repository/models/{model}/{action}", {})
    if status != 200:
        raise SystemExit(f"{action} {model}: {answer}")


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))]


def measure(server, model, texts, options):
    """One run of one model, which is loaded for it alone."""
    control(server, "load", model)
    try:
        requests = [closed_loop.request(model, [text], "EMBEDDING") for text, _ in texts]
        closed_loop.run(server.http, requests, options.connections, seconds=options.warmup)
        before = counts(server, model)
        if options.rate:
            answers = closed_loop.run_at(server.http, requests, arrivals(options.rate, options.seconds))
        else:
            answers = closed_loop.run(server.http, requests, options.connections, seconds=options.seconds)
        after = counts(server, model)
    finally:
        control(server, "unload", model)
        harness.until(lambda: server.index()[model][0] == "UNAVAILABLE")
    if {answer.status for answer in answers} != {200}:
        raise SystemExit(f"{model}: {next(answer.body for answer in answers if answer.status != 200)!r}")
    latency = {long: [1e3 * (a.received - a.sent) for a in answers if texts[a.index][1] == long] for long in (False, True)}
    executions, passes, tokens = (b - a for a, b in zip(before, after))
    begin, end = min(a.sent for a in answers), max(a.received for a in answers)
    return {
        "throughput": len(answers) / (end - begin),
        "short_p50_ms": percentile(latency[False], 0.5),
        "short_p99_ms": percentile(latency[False], 0.99),
        "long_p50_ms": percentile(latency[True], 0.5),
        "long_p99_ms": percentile(latency[True], 0.99),
        "executions": executions,
        "passes": passes,
        "tokens_per_pass": tokens / passes,
    }


def arrivals(rate, seconds, seed=20):
    """Times of a Poisson process."""
    rng, times, now = random.Random(seed), [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


def counts(server, model):
    return (
        server.statistics(model)["execution_count"],
        server.metric("rust_batch_tokens_count", model=model),
        server.metric("rust_batch_tokens_sum", model=model),
    )


def read_runs(path):
    """What an earlier call has written: (round, (variant, max_batch_size, delay), figures)."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    key = lambda row: (row["variant"], int(row["max_batch_size"]), int(row["queue_delay_us"]))
    return [(int(row["round"]), key(row), {name: float(row[name]) for name in COLUMNS}) for row in rows]


def table(rows, first):
    titles = [*first, *COLUMNS.values()]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for key, row in rows:
        numbers = [f"{row[name]:.0f}" if row[name] >= 100 else f"{row[name]:.1f}" for name in COLUMNS]
        lines.append("| " + " | ".join([*map(str, key), *numbers]) + " |")
    return "\n".join(lines)


def best_points(points):
    """variant -> (its best point, the median there), after the rule in the module's text."""
    floor, best = 0.0, {}
    # `neither` comes first, where it is there.
    for variant in dict.fromkeys(variant for variant, _, _ in points):
        mine = {key: row for key, row in points.items() if key[0] == variant}
        fast = {key: row for key, row in mine.items() if row["throughput"] >= floor}
        if not fast:
            print(f"{variant}: no point has 95 % of the throughput of `neither`")
        chosen = fast or mine
        key = min(chosen, key=lambda key: chosen[key]["short_p99_ms"])
        best[variant] = (key, chosen[key])
        if variant == "neither":
            floor = 0.95 * chosen[key]["throughput"]
    return best


def machine():
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} processors, Linux {platform.release()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each run")
    parser.add_argument("--warmup", type=float, default=2)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=float, help="texts a second, at random times")
    parser.add_argument("--instances", type=int, help="default: the backend's")
    parser.add_argument("--budget", type=int, help="max_batch_tokens of re-split and batcher; default: the engine's")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS, help="microseconds")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--add", action="store_true", help="to the rounds that are in the file already")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "tail_latency.csv")
    options = parser.parse_args()
    options.variants = [variant for variant in VARIANTS if variant in options.variants]

    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        # Every point names its batching library, or none.
        backends = work / "backends"
        (backends / "rust").mkdir(parents=True)
        (backends / "rust" / harness.LIBRARY.name).symlink_to(harness.LIBRARY.resolve())
        models = repository.Repository(work / "models")
        names = add_models(models, options)
        models.add("counts", "minilm", {"max_length": MAX_LENGTH})
        flags = ["--model-control-mode=explicit", "--load-model=counts"]
        runs = read_runs(options.out) if options.add else []
        first_round = 1 + max((number for number, _, _ in runs), default=-1)
        print(machine())
        with harness.Server(models, work / "log", flags, backends=backends) as server:
            texts = make_texts(server, "counts")
            print(next(line for line in server.log().splitlines() if "model 'counts'" in line).split("] ", 1)[-1])
            control(server, "unload", "counts")
            for round_number in range(first_round, first_round + options.rounds):
                for size in options.sizes:
                    for delay in options.delays:
                        for variant in options.variants:
                            key = (variant, size, delay)
                            row = measure(server, names[key], texts, options)
                            runs.append((round_number, key, row))
                            print(round_number, *key, f"{row['throughput']:.0f}/s p99 {row['short_p99_ms']:.1f} ms", flush=True)

    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", "variant", "max_batch_size", "queue_delay_us", *COLUMNS])
        for round_number, key, row in runs:
            writer.writerow([round_number, *key, *(f"{row[name]:.2f}" for name in COLUMNS)])
    points = {}
    for key in names:
        mine = [row for _, other, row in runs if other == key]
        points[key] = {name: statistics.median(row[name] for row in mine) for name in COLUMNS}
    first = ["variant", "max_batch_size", "delay us"]
    print("\nAll points, medians:\n\n" + table(points.items(), first))
    best = best_points(points)
    print("\nBest points:\n\n" + table(best.values(), first))
    if "neither" in best:
        print()
        for variant, (_, row) in best.items():
            print(f"{variant}: {compare(row, best['neither'][1])}")
        print("\nAgainst `neither` at the same point, p99 of short texts and throughput:\n")
        print("| max_batch_size | delay us | " + " | ".join(options.variants[1:]) + " |" + "\n" + "|---" * (1 + len(options.variants)) + "|")
        for size in options.sizes:
            for delay in options.delays:
                cells = [compare(points[v, size, delay], points["neither", size, delay]) for v in options.variants[1:]]
                print(f"| {size} | {delay} | " + " | ".join(cells) + " |")
    means = {}
    for variant in options.variants:
        mine = [row for _, key, row in runs if key[0] == variant]
        means[variant] = {name: statistics.mean(row[name] for row in mine) for name in COLUMNS}
    print("\nAll runs, means:\n\n" + table([((variant,), row) for variant, row in means.items()], first[:1]))


def compare(row, reference):
    p99, speed = reference["short_p99_ms"] / row["short_p99_ms"], row["throughput"] / reference["throughput"]
    return f"{p99:.2f} x better, {speed:.2f} of the throughput"


if __name__ == "__main__":
    main()
