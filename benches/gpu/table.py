"""What run.sh measured, as one table: python table.py --figures DIR --out DIR

Makes <out>/<day>-<device>/ with gpu.csv (every figure), gpu-sweep.csv (tokens of a pass) and gpu.md (the table, which is
printed, too). Nothing but Python's own library is needed.
"""

import argparse
import csv
import json
import re
from pathlib import Path

# (model, texts, figure, least or most, text): what an H200 is asked to show.
GOALS = [
    ("bert-base", "128", "percent", ">=", 60.0, "% of the fp16 product's rate"),
    ("bert-base", "128", "torch", ">=", 1.2, "x PyTorch"),
    ("bert-base", "natural", "torch", ">=", 2.0, "x PyTorch, padded in the order of arrival"),
    ("bert-base", "128", "latency", "<=", 0.5, "ms for a batch of one"),
]
RIVALS = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime"}


def pairs(path):
    """`name: value` lines."""
    return dict(line.split(": ", 1) for line in path.read_text("utf-8").splitlines() if ": " in line)


def rows(path):
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Figures:
    def __init__(self, directory):
        self.facts = pairs(directory / "run.txt") | pairs(directory / "facts.txt")
        rivals = directory / "rivals.json"
        self.rivals = json.loads(rivals.read_text("utf-8")) if rivals.exists() else {}
        self.rows = rows(directory / "ours.csv") + rows(directory / "rivals.csv")
        self.sweep = rows(directory / "sweep.csv")
        self.by = {(row["contestant"], row["model"], row["texts"]): row for row in self.rows}
        self.order = [(row["model"], row["texts"]) for row in self.rows if row["contestant"] == "triton-rust"]

    def number(self, contestant, model, texts, column):
        value = self.by.get((contestant, model, texts), {}).get(column)
        return float(value) if value else None

    def ratio(self, rival, model, texts):
        ours = self.number("triton-rust", model, texts.removesuffix(" sorted"), "sequences_per_s")
        theirs = self.number(rival, model, texts, "sequences_per_s")
        return ours / theirs if ours and theirs else None

    def where(self):
        """date, device, driver, versions: the first columns of every CSV row."""
        names = ["date", "device", "driver", "CUDA of the driver", "cublasLt", "matmul", "commit"]
        return {name.lower().replace(" ", "_"): self.facts.get(name, "unknown") for name in names}


def show(value, digits=2):
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def markdown(cells, left):
    """Lines of a table whose columns line up, the first `left` of them to the left."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for row in [cells[0], rule, *cells[1:]]:
        padded = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("| " + " | ".join(padded) + " |")
    return lines


def main_table(figures):
    present = [name for name in RIVALS if any(row["contestant"] == name for row in figures.rows)]
    head = ["model", "tokens", "sequences/s", "% of product", "one text: ms", "p99 ms"]
    for name in present:
        head += [f"{RIVALS[name]}: sequences/s", "ours to it", "one text: ms"]
    cells = [head]
    order = []
    for model, texts in figures.order:
        order.append((model, texts))
        if texts == "natural" and any((name, model, "natural sorted") in figures.by for name in present):
            order.append((model, "natural sorted"))
    for model, texts in order:
        mine = [
            show(figures.number("triton-rust", model, texts, column), digits)
            for column, digits in (("sequences_per_s", 1), ("percent_of_matmul", 1), ("latency_p50_ms", 3), ("latency_p99_ms", 3))
        ]
        line = [model, texts, *mine]
        for name in present:
            line += [
                show(figures.number(name, model, texts, "sequences_per_s"), 1),
                show(figures.ratio(name, model, texts)),
                show(figures.number(name, model, texts, "latency_p50_ms"), 3),
            ]
        cells.append(line)
    return markdown(cells, 2)


def sweep_table(figures):
    passes = list(dict.fromkeys(row["pass_tokens"] for row in figures.sweep))
    keys = list(dict.fromkeys((row["model"], row["texts"]) for row in figures.sweep))
    by = {(row["model"], row["texts"], row["pass_tokens"]): row["percent_of_matmul"] for row in figures.sweep}
    cells = [["model", "tokens", *passes]]
    cells += [[*key, *(show(float(by[*key, tokens]), 1) if by.get((*key, tokens)) else "-" for tokens in passes)] for key in keys]
    return markdown(cells, 2)


def goals(figures):
    for model, texts, what, sign, wanted, text in GOALS:
        if what == "torch":
            reached = figures.ratio("torch", model, texts)
        else:
            column = {"percent": "percent_of_matmul", "latency": "latency_p50_ms"}[what]
            reached = figures.number("triton-rust", model, texts, column)
        if (model, texts) not in figures.order:
            continue
        if reached is None:
            verdict = "not measured"
        else:
            met = reached >= wanted if sign == ">=" else reached <= wanted
            verdict = f"{reached:.2f}, {'met' if met else 'NOT met'}"
        yield f"- {model}, {texts} tokens: {sign} {wanted} {text}: {verdict}"


def page(figures):
    facts = figures.facts
    lines = [f"# {facts.get('device', 'unknown device')}, {facts.get('date')}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if name not in ("device", "date")]
    lines += [f"- {RIVALS.get(name, name)}: {value}" for name, value in figures.rivals.items()]
    lines += ["", "fp16. `% of product`: of the rate above, by the FLOPs of the real tokens. How: benches/README.md.", ""]
    lines += main_table(figures)
    lines += ["", "% of product by the tokens of a pass:", ""]
    lines += sweep_table(figures)
    wanted = list(goals(figures))
    if wanted:
        lines += ["", "Asked for on an H200:", "", *wanted]
    return "\n".join(lines) + "\n"


def write_csv(path, rows, first):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*first, *columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(first | row for row in rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figures = Figures(args.figures)
    slug = re.sub(r"[^a-z0-9]+", "-", figures.facts["device"].lower()).strip("-")
    out = args.out / f"{figures.facts['date']}-{slug}"
    out.mkdir(parents=True, exist_ok=True)
    text = page(figures)
    (out / "gpu.md").write_text(text, "utf-8")
    write_csv(out / "gpu.csv", figures.rows, figures.where())
    write_csv(out / "gpu-sweep.csv", figures.sweep, figures.where())
    print(text)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
