"""What sentence-transformers and transformers answer, in fp32, for corpus.json: run by hand, its output is committed.

    python -m venv gold && gold/bin/pip install -r requirements.txt && gold/bin/python make_references.py

Writes references.json (what was asked: names, max lengths, labels), references.safetensors (what was answered),
tokens.json (ids after truncation). See README.md for the fields.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import numpy as np  # noqa: E402
import sentence_transformers  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline  # noqa: E402

import checkpoints  # noqa: E402

FP32 = {"dtype": torch.float32, "attn_implementation": "eager"}

# The texts that the small checkpoints answer: one of each kind.
SMALL_TEXTS = (
    "empty space one_letter one_word two_words plain quote numbers url code markup capitals contractions list "
    "german vietnamese greek russian hebrew_points arabic hindi thai chinese japanese korean mixed_scripts "
    "accents_nfc accents_nfd accents_stacked emoji emoji_zwj nul_inside controls separators zero_width punctuation "
    "special_sep special_cls special_glued word_100 word_101 white_long removed_long cjk_long "
    "tokens_16 tokens_17 tokens_47 tokens_48 tokens_49 tokens_63 tokens_64 tokens_65 tokens_127 tokens_128 tokens_129 "
    "words_20 words_60 words_120 words_1000"
).split()
# Short ones, whose hidden states are kept layer by layer.
HIDDEN_TEXTS = ["one_word", "two_words", "accents_nfd"]
HIDDEN_PAIRS = ["question_5", "first_empty"]
# Checkpoints whose ids are kept: every way to truncate, cased, left, pairs.
TOKENS_OF = (
    "embed_mean embed_max_normalize embed_left embed_left_in_json embed_cased embed_cased_json_silent_config "
    "embed_lower_json_cased_config embed_cased_json_fast_class embed_st_lower embed_prompt classify_left "
    "classify_pair_sigmoid classify_pair_three classify_pair_left"
).split()


class Out:
    def __init__(self):
        self.tensors, self.models, self.tokens = {}, {}, {}

    def tensor(self, name, array):
        array = np.ascontiguousarray(array, dtype=np.float32)
        assert np.isfinite(array).all(), name
        self.tensors[name] = array


def encoded(tokenizer, rows, max_length):
    """Ids and token types per row, truncated as the reference does, unpadded; and the count before truncation."""
    out = []
    for row in rows:
        # Always a batch: tokenizer(a, "") drops an empty second text, tokenizer([(a, "")]) and CrossEncoder keep it.
        batch = [(row["text"], row["text_pair"])] if "text_pair" in row else [row["text"]]
        full = tokenizer(batch, truncation=False, verbose=False)["input_ids"][0]
        cut = tokenizer(batch, truncation="longest_first", max_length=max_length)
        ids = cut["input_ids"][0]
        assert len(ids) == min(max_length, len(full))
        # A tokenizer that is not a BertTokenizer gives no token types, and then the model takes zeros.
        types = cut["token_type_ids"][0] if "token_type_ids" in cut else [0] * len(ids)
        out.append({"ids": ids, "types": types, "full": len(full)})
    return out


def tokens_entry(max_length, rows, cuts):
    side = {"names": [r["name"] for r in rows], "max_length": max_length}
    side["rows"] = [{"ids": c["ids"], "types_from": sum(t == 0 for t in c["types"])} for c in cuts]
    for c in cuts:
        assert c["types"] == sorted(c["types"])  # zeros, then ones: `types_from` says it all
    return side


def describe(rows, cuts, max_length, truncation_side, **more):
    return {
        "rows": [r["name"] for r in rows],
        "max_length": max_length,
        "truncation_side": truncation_side,
        "token_counts": [len(c["ids"]) for c in cuts],
        "full_token_counts": [c["full"] for c in cuts],
        **more,
    }


def embed(out, name, directory, rows, keep_tokens):
    model = SentenceTransformer(str(directory), device="cpu", local_files_only=True, model_kwargs=FP32)
    tokenizer, limit = model.tokenizer, model.max_seq_length
    prompt = model.prompts.get(model.default_prompt_name, "")
    cuts = encoded(tokenizer, [{"text": prompt + r["text"]} for r in rows], limit)
    vectors = np.stack([model.encode(r["text"], batch_size=1, show_progress_bar=False) for r in rows])
    for row, cut in zip(rows, cuts):
        assert model.preprocess([prompt + row["text"]])["input_ids"][0].tolist() == cut["ids"], row["name"]
    out.tensor(f"{name}/embeddings", vectors)
    kinds = [type(m).__name__ for m in model]
    pooling = model[1].pooling_mode
    out.models[name] = describe(
        rows,
        cuts,
        limit,
        tokenizer.truncation_side,
        task="embed",
        pooling=pooling if isinstance(pooling, str) else list(pooling),
        normalize="Normalize" in kinds,
        modules=kinds,
        prompt=prompt,
        truncate_dim=model.truncate_dim,
        dimension=int(vectors.shape[1]),
    )
    if keep_tokens:
        out.tokens[name] = tokens_entry(limit, rows, cuts)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    print(f"{name}: {kinds[1:]} {pooling} max {limit}, cosines {cosines.min():.2f} to {np.median(cosines):.2f} (median)")


def function_to_apply(config):
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def apply_function(function, logits):
    if function == "softmax":
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()
    return 1 / (1 + np.exp(-logits)) if function == "sigmoid" else logits


def classify(out, name, directory, rows, pair, keep_tokens):
    model, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True, **FP32)
    assert not any(info.values()), (name, info)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    cross = CrossEncoder(str(directory), device="cpu", local_files_only=True, model_kwargs=FP32)
    assert cross.max_seq_length == limit
    cuts = encoded(tokenizer, rows, limit)
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    function = function_to_apply(model.config)
    logits, probabilities, best = [], [], []
    for row, cut in zip(rows, cuts):
        with torch.no_grad():
            answer = model(input_ids=torch.tensor([cut["ids"]]), token_type_ids=torch.tensor([cut["types"]]))
        logits.append(answer.logits[0].numpy())
        question = {"text": row["text"], "text_pair": row["text_pair"]} if pair else row["text"]
        scores = apply_function(function, logits[-1].astype(np.float64))
        if not pair or row["text_pair"]:  # the pipeline drops an empty second text
            answers = pipe(question, top_k=None, truncation=True, max_length=limit)
            answers = {s["label"]: s["score"] for s in (answers[0] if isinstance(answers[0], list) else answers)}
            piped = [answers[model.config.id2label[i]] for i in range(model.config.num_labels)]
            np.testing.assert_allclose(piped, scores, atol=2e-6)
        probabilities.append(scores)
        best.append(model.config.id2label[int(np.argmax(probabilities[-1]))])
    logits, probabilities = np.stack(logits), np.array(probabilities, dtype=np.float32)
    out.tensor(f"{name}/logits", logits)
    out.tensor(f"{name}/probabilities", probabilities)
    more = {}
    if pair:
        predicted = cross.predict([(r["text"], r["text_pair"]) for r in rows], batch_size=1, show_progress_bar=False)
        activated = 1 / (1 + np.exp(-logits)) if isinstance(cross.activation_fn, torch.nn.Sigmoid) else logits
        np.testing.assert_allclose(predicted.reshape(logits.shape), activated, atol=1e-5)
        out.tensor(f"{name}/cross_encoder", predicted)
        more["cross_encoder_activation"] = type(cross.activation_fn).__name__
    out.models[name] = describe(
        rows,
        cuts,
        limit,
        tokenizer.truncation_side,
        task="classify",
        pair=pair,
        labels=[model.config.id2label[i] for i in range(model.config.num_labels)],
        problem_type=model.config.problem_type,
        function=function,
        best=best,
        **more,
    )
    if keep_tokens:
        out.tokens[name] = tokens_entry(limit, rows, cuts)
    spread = np.ptp(logits, axis=0)
    print(f"{name}: {function} max {limit}, logits {logits.min():.2f} to {logits.max():.2f}, spread {spread.min():.2f}")


def hidden(out, name, directory, rows):
    """`NAME/hidden/ROW`: [layers + 1, tokens, hidden]: the embeddings' output, then each layer's."""
    model = AutoModel.from_pretrained(directory, **FP32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for row, cut in zip(rows, encoded(tokenizer, rows, model.config.max_position_embeddings)):
        with torch.no_grad():
            answer = model(
                input_ids=torch.tensor([cut["ids"]]),
                token_type_ids=torch.tensor([cut["types"]]),
                output_hidden_states=True,
            )
        out.tensor(f"{name}/hidden/{row['name']}", torch.stack(answer.hidden_states)[:, 0].numpy())
        out.models[name].setdefault("hidden", {})[row["name"]] = cut["ids"]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    corpus = json.loads((HERE / "corpus.json").read_text("ascii"))
    by_name = {row["name"]: row for row in corpus["texts"]}
    pair_by_name = {row["name"]: row for row in corpus["pairs"]}
    small = [by_name[name] for name in SMALL_TEXTS]
    hidden_rows = [by_name[name] for name in HIDDEN_TEXTS]
    hidden_pairs = [pair_by_name[name] for name in HIDDEN_PAIRS]
    out = Out()

    minilm = checkpoints.minilm_directory()
    embed(out, "minilm", minilm, corpus["texts"], keep_tokens=True)
    hidden(out, "minilm", minilm, hidden_rows)
    for row in corpus["texts"]:
        if row["name"].startswith("tokens_"):
            index = out.models["minilm"]["rows"].index(row["name"])
            assert out.models["minilm"]["full_token_counts"][index] == int(row["name"][7:]), row["name"]

    with tempfile.TemporaryDirectory() as scratch:
        sentiment = HERE.parents[1] / "model_repo" / "sentiment" / "head.safetensors"
        if sentiment.exists():
            import assemble_models

            directory = Path(scratch) / "sentiment"
            assemble_models.assemble_sentiment(directory, sentiment)
            classify(out, "sentiment", directory, corpus["texts"], pair=False, keep_tokens=False)
            limit = out.models["sentiment"]["max_length"]
            pairs_cut = encoded(AutoTokenizer.from_pretrained(directory), corpus["pairs"], limit)
            out.tokens["sentiment_pairs"] = tokens_entry(limit, corpus["pairs"], pairs_cut)
        for name in checkpoints.CHECKPOINTS:
            spec = checkpoints.spec(name)
            directory = checkpoints.write_checkpoint(name, Path(scratch) / name)
            if spec["task"] == "embed":
                embed(out, name, directory, small, name in TOKENS_OF)
            else:
                rows = corpus["pairs"] if spec["pair"] else small
                classify(out, name, directory, rows, spec["pair"], name in TOKENS_OF)
            if name in ("embed_mean", "embed_gelu_new", "embed_head_dim_64"):
                hidden(out, name, directory, hidden_rows)
            if name == "classify_pair_three":
                hidden(out, name, directory, hidden_pairs)

    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    write_rows(HERE / "references.json", {"versions": versions}, "models", out.models)
    write_rows(HERE / "tokens.json", {}, "tokenizers", out.tokens)
    checkpoints.write_safetensors(HERE / "references.safetensors", out.tensors)
    size = sum((HERE / f).stat().st_size for f in ("references.json", "tokens.json", "references.safetensors"))
    print(f"{len(out.models)} models, {len(out.tensors)} tensors, {size / 1e6:.2f} MB")


def write_rows(path, head, key, models):
    """One line a field: a diff says what changed, and the file stays small."""
    lines = [f'"{k}": {json.dumps(v)},' for k, v in head.items()]
    lines.append(f'"{key}": {{')
    for i, (name, fields) in enumerate(models.items()):
        lines.append(f'"{name}": {{')
        body = [f'  "{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in fields.items()]
        lines.append(",\n".join(body))
        lines.append("}" + ("," if i + 1 < len(models) else ""))
    lines.append("}")
    checkpoints.write_atomically(path, ("{\n" + "\n".join(lines) + "\n}\n").encode("ascii"))


if __name__ == "__main__":
    main()
