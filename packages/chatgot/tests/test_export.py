"""Export: the folder that is written, what transformers makes of it, and what is refused."""

import errno
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from chatgot.data.tokenizers.bpe import BpeTokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.export import export
from chatgot.generate import generate
from chatgot.model.config import ModelConfig, RopeScaling
from chatgot.model.gpt import GPT
from faults import injection as faults
from tensorkeep.errors import (
    DestinationExistsError,
    StateMismatchError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.testing.cases import case

# One worker imports transformers, which takes seconds.
pytestmark = pytest.mark.xdist_group("transformers")

GPT2: dict[str, Any] = {"positions": "learned", "norm": "layernorm"}
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
CASES = [
    *(
        {**GPT2, "activation": activation, "bias": bias, "tied": tied}
        for activation, bias, tied in itertools.product(("gelu", "gelu_tanh"), (False, True), (False, True))
    ),
    *({**LLAMA, "tied": tied, "rope_base": base} for tied, base in ((False, 10000.0), (True, 500.0))),
    {**LLAMA, "n_heads": 3, "kv_heads": 1},
    {**LLAMA, "n_heads": 3, "kv_heads": 1, "qk_norm": True, "head_dim": 6},
    {**LLAMA, "rope_scaling": RopeScaling(kind="linear", factor=2.5)},
    {**LLAMA, "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_context_length=40)},
]
END = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<end>", "special": True, **END}],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "Whitespace"},
}


def build(**parts: Any) -> GPT:
    """Return a tiny model in which every weight matters."""
    sizes = {"vocab_size": 13, "context_length": 10, "n_layers": 2, "n_heads": 2, "d_model": 12, "norm_eps": 1e-4}
    model = GPT(ModelConfig(**sizes | parts))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return model.eval()


def opened(transformers: Any, folder: Path) -> Any:
    """Return the model that transformers finds, which must find in turn all that it looks for, and nothing else."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "parts",
    # Two of a GPT-2 have each choice.
    [pytest.param(each, marks=[pytest.mark.exhaustive] * (number in range(1, 7))) for number, each in enumerate(CASES)],
    ids=lambda parts: "-".join(map(str, parts.values())),
)
def test_transformers_computes_the_same_logits_and_generates_the_same_tokens(
    transformers: Any, tmp_path: Path, parts: dict[str, Any]
) -> None:
    model = build(**parts)
    report = export(model, model.config, tmp_path / "out")
    theirs = opened(transformers, tmp_path / "out")
    assert type(theirs).__name__ == report.architecture
    assert theirs.num_parameters() == report.parameters
    tokens = torch.randint(13, (3, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, found = model(tokens), theirs(tokens).logits
    assert ours.std() > 0.3
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)
    prompt = torch.tensor([[1, 2, 3]])
    found = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=7, do_sample=False)
    assert torch.equal(found, generate(model, prompt, max_new_tokens=7, temperature=0))


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_requested_dtype(transformers: Any, tmp_path: Path) -> None:
    model = build(**LLAMA)
    report = export(model, model.config, tmp_path / "out", dtype="bfloat16")
    theirs = opened(transformers, tmp_path / "out")
    assert (report.dtype, theirs.dtype) == ("bfloat16", torch.bfloat16)
    assert torch.equal(theirs.model.embed_tokens.weight, model.tokens.weight.bfloat16())


@pytest.mark.filterwarnings("ignore")
def test_transformers_opens_the_tokenizer(transformers: Any, tmp_path: Path) -> None:
    model = build(**GPT2)
    export(model, model.config, tmp_path / "out", tokenizer_json=json.dumps(TOKENIZER), end_of_document=3)
    theirs = opened(transformers, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b<end> zzz")["input_ids"] == [0, 1, 3, 2]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.model_max_length) == ("<end>", 3, 10)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 3


@pytest.mark.filterwarnings("ignore")
def test_transformers_ends_answers_and_has_the_template_of_conversations(transformers: Any, tmp_path: Path) -> None:
    chat = ChatTokenizer(BpeTokenizer.learn(iter([iter(["user and assistant say hi"] * 9)]), True, vocab_size=270))
    chat.begin_of_document = 1
    model = build(**{**GPT2, "vocab_size": chat.vocab_size})
    text = chat.hugging_face_json()
    ends = {"begin_of_document": 1, "end_of_document": chat.end_of_document, "end_of_message": chat.end}
    export(model, model.config, tmp_path / "out", tokenizer_json=text, **ends)
    theirs = opened(transformers, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", chat.end)
    assert theirs.generation_config.eos_token_id == [chat.end, chat.end_of_document]
    assert theirs.generation_config.bos_token_id == tokenizer.bos_token_id == 1
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "hi"}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(found) == [1, *chat.message("system", "the"), *chat.message("user", "hi"), chat.begin["assistant"]]


def test_state_dict_is_exported_like_its_model_and_tensors_that_share_memory_are_all_in_the_file(
    tmp_path: Path,
) -> None:
    model = build(**GPT2)
    tensorkeep.save({"model": model.state_dict()}, tmp_path / "ckpt")
    first = export(model, model.config, tmp_path / "model")
    second = export(tensorkeep.load(tmp_path / "ckpt")["model"], model.config, tmp_path / "state")
    assert (tmp_path / "model/model.safetensors").read_bytes() == (tmp_path / "state/model.safetensors").read_bytes()
    assert (first.parameters, first.files) == (second.parameters, ("model.safetensors", "config.json"))
    assert first.parameters == model.config.parameter_count() + model.config.d_model * (5 + 2 * (3 + 1 + 4 + 1))
    assert first.stored_bytes == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert first.as_dict()["architecture"] == "GPT2LMHeadModel"
    model = build(**LLAMA, tied=False)
    state = model.state_dict()
    state["head.weight"] = state["tokens.weight"]
    export(state, model.config, tmp_path / "out")
    assert b'"lm_head.weight"' in (tmp_path / "out/model.safetensors").read_bytes()
    saved = tensorkeep.load(tmp_path / "out/model.safetensors")
    assert torch.equal(saved["lm_head.weight"], model.tokens.weight)


def test_exported_file_is_safetensors_with_the_names_of_transformers(tmp_path: Path) -> None:
    model = build(**LLAMA, tied=False, n_layers=1)
    export(model, model.config, tmp_path / "out")
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    layer = {"mlp.gate_proj": (32, 12), "mlp.up_proj": (32, 12), "mlp.down_proj": (12, 32)}
    layer |= {f"self_attn.{part}_proj": (12, 12) for part in "qkvo"}
    vectors = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (12,))
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == {
        "model.embed_tokens.weight": (13, 12),
        "model.norm.weight": (12,),
        "lm_head.weight": (13, 12),
        **{f"model.layers.0.{name}.weight": shape for name, shape in (layer | vectors).items()},
    }
    document = json.loads((tmp_path / "out/config.json").read_text())
    # The special tokens of published models are not in the configuration.
    assert [document[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [None, None, None]
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == 10000.0
    assert document["architectures"] == ["LlamaForCausalLM"]
    saved = tensorkeep.load(tmp_path / "out/model.safetensors")
    assert torch.equal(saved["model.layers.0.self_attn.k_proj.weight"], model.blocks[0].attention.qkv.weight[12:24])


def test_model_without_architecture_in_transformers_is_refused_with_the_reasons(tmp_path: Path) -> None:
    model = build(positions="rotary", norm="layernorm", activation="relu2", bias=True)
    with pytest.raises(UnsupportedError) as caught:
        export(model, model.config, tmp_path / "out")
    assert caught.value.message == (
        "transformers has no architecture for this model: "
        "a GPT-2 needs positions='learned' (it is 'rotary'), activation='gelu' or 'gelu_tanh' (it is 'relu2'); "
        "a LLaMA needs norm='rmsnorm' (it is 'layernorm'), activation='swiglu' (it is 'relu2'), bias=False (it is "
        "True); "
        "a Qwen 3 needs qk_norm=True (it is False), norm='rmsnorm' (it is 'layernorm'), activation='swiglu' (it is "
        "'relu2'), bias=False (it is True)"
    )
    assert list(tmp_path.iterdir()) == []
    for parts in ({}, LLAMA):
        for name, value, plain in (("token_shift", True, False), ("convolution", 3, 1)):
            model = build(**parts, **{name: value})
            message = rf"needs {name}={plain} \(it is {value}\)"
            with case((parts, name)), pytest.raises(UnsupportedError, match=message):
                export(model, model.config, tmp_path / "out")


def test_tensors_of_another_model_and_invalid_arguments_are_refused(tmp_path: Path) -> None:
    model = build(**GPT2)
    state = dict(model.state_dict())
    state["blocks.0.mlp.fc.weight"] = state.pop("blocks.0.mlp.up.weight")
    state["norm.weight"] = torch.zeros(13)
    with pytest.raises(StateMismatchError) as mismatch:
        export(state, model.config, tmp_path / "out")
    assert mismatch.value.missing == ("blocks.0.mlp.up.weight",)
    assert mismatch.value.extra == ("blocks.0.mlp.fc.weight",)
    assert mismatch.value.different == ("norm.weight",)
    assert "missing: blocks.0.mlp.up.weight" in mismatch.value.message
    with pytest.raises(UsageError, match="configuration is not the model"):
        export(model, build(**GPT2, dropout=0.1).config, tmp_path / "out")
    beyond = json.dumps(TOKENIZER).replace('"b": 1', '"b": 13')
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "int8"}, "the dtype is int8"),
        ({"dtype": torch.float64}, "the dtype is float64"),
        ({"end_of_document": 13}, "the end of document is token 13, and the model has tokens 0 to 12"),
        *(
            ({"tokenizer_json": text}, r"not a tokenizer\.json")
            for text in ("{", "[" * 100_000, '{"model": {"vocab": [1]}}')
        ),
        ({"tokenizer_json": beyond}, "the tokenizer has the token 13"),
    ]
    for arguments, message in refused:
        with case(str(arguments)[:50]):
            with pytest.raises(UsageError, match=message) as caught:
                export(model, model.config, tmp_path / "out", **arguments)
            assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced_and_only_if_asked(tmp_path: Path) -> None:
    model, out = build(**GPT2), tmp_path / "out"
    export(model, model.config, out)
    with pytest.raises(DestinationExistsError, match="exists already"):
        export(model, model.config, out)
    export(model, model.config, out, dtype="float16", overwrite=True)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DestinationExistsError, match="not replaced"):
        export(model, model.config, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_failing_disk_leaves_no_partial_export(tmp_path: Path) -> None:
    model = build(**GPT2, n_layers=1)
    whole = faults.count_operations(lambda: export(model, model.config, tmp_path / "whole"))
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    failures = 0
    for index in range(whole):
        folder = tmp_path / str(index)
        try:
            with faults.broken(fail_at=index, action=faults.raise_error(errno.ENOSPC)):
                export(model, model.config, folder / "out")
        except TensorkeepError as error:
            failures += 1
            assert isinstance(error, StoreError), error
        found = list((folder / "out").iterdir()) if (folder / "out").exists() else []
        assert {path.name for path in found} in (set(), names)
    assert failures > whole / 2


@pytest.mark.integration
def test_killed_export_is_invisible_and_does_not_block_the_next(tmp_path: Path) -> None:
    model, out = build(**GPT2, n_layers=1), tmp_path / "out"
    whole = faults.count_operations(lambda: export(model, model.config, tmp_path / "whole"))

    def work(index: int) -> None:
        with faults.broken(fail_at=index, action=faults.die):
            export(model, model.config, out)

    for index in range(1, whole, 5):
        assert faults.in_child(lambda index=index: work(index)) == 9
        assert not out.exists() or index > whole - 5
        export(model, model.config, out, overwrite=True)
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
        shutil.rmtree(out)
