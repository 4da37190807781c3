"""Checkpoints of the paper's published code: files recorded from it, and files of modules with the same names."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint import adaptive_span
from megatron_allattn.checkpoint.adaptive_span_model import entries, logical_shapes
from megatron_allattn.config import ModelConfig, OptimizerConfig, RunConfig, UsageError
from tests.support.span_files import SHAPES, STEP, Shape, assert_equal, content, save
from tests.support.template import ROOT

CASES = ROOT / "tests/data/reference"
EVERYTHING = [*SHAPES, "adaptive_span_char", "adaptive_span_word"]


def file_of(name: str, folder: Path) -> Path:
    return save(folder / "a.pt", content(SHAPES[name])) if name in SHAPES else CASES / f"{name}.pt"


def configured(path: Path, found: adaptive_span.Checkpoint, **model: Any) -> RunConfig:
    return adaptive_span.configure(path, found, RunConfig(model=ModelConfig(**model)), frozenset())


def written(found: adaptive_span.Checkpoint, run: RunConfig, source: dict[str, Any] | None) -> dict[str, Any]:
    weights, states = found.model.weights, found.state
    lr = run.optimizer.lr
    return adaptive_span.write(run, found.step, lr, weights.__getitem__, states.__getitem__, source)


@pytest.mark.parametrize("name", EVERYTHING)
def test_there_and_back_is_the_same_file(name: str, tmp_path: Path) -> None:
    path = file_of(name, tmp_path)
    found = adaptive_span.read(path)
    source = json.loads(json.dumps(found.source))  # as state.json keeps it
    back = written(found, configured(path, found), source)
    assert_equal(dict(back), torch.load(path, weights_only=True))
    pair = [back["model"][key].data_ptr() for key in back["model"] if "layers.0." in key and "current_val" in key]
    assert len(set(pair)) <= 1  # saved once


@pytest.mark.parametrize("name", EVERYTHING)
def test_as_a_file_of_our_own_it_holds_the_same(name: str, tmp_path: Path) -> None:
    """Without what was kept for the way back: only the log is lost, and the outer iteration is that of 1000 updates."""
    path = file_of(name, tmp_path)
    found = adaptive_span.read(path)
    run = configured(path, found)
    run = replace(run, optimizer=replace(run.optimizer, lr_warmup_iters=1))
    back, original = written(found, run, None), torch.load(path, weights_only=True)
    assert_equal(back["model"], dict(original["model"]))
    assert_equal(back["optimizer"]["state"], original["optimizer"]["state"])
    (group,), (expected,) = back["optimizer"]["param_groups"], original["optimizer"]["param_groups"]
    assert group == expected
    assert (back["logger"], back["iter_no"], back["scheduler_iter"]) == ({}, 0, found.step)
    again = adaptive_span.read(save(tmp_path / "b.pt", back))
    assert_equal(again.model.weights, found.model.weights)
    assert_equal(again.state, found.state)
    assert (again.model.shape, again.optimizer, again.step) == (found.model.shape, found.optimizer, found.step)


def test_torch_goes_on_from_a_file_of_our_own(tmp_path: Path) -> None:
    """The optimizer that is given its settings and state makes the same update as the one that was saved."""
    shape = SHAPES["plain"]
    saved = content(shape)
    found = adaptive_span.read(save(tmp_path / "a.pt", saved))
    back = written(found, configured(tmp_path / "a.pt", found), None)
    updated = []
    for state in (saved, back):
        keys = [key for key in state["model"] if "mask_template" not in key]
        unique = {key: state["model"][key].clone() for key in keys if "persistent_memory.adaptive" not in key}
        optimizer = torch.optim.Adagrad(unique.values(), lr=1.0)
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        torch.manual_seed(1)
        for parameter in unique.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        updated.append(unique)
    assert_equal(updated[1], updated[0])


def test_what_the_recorded_files_say() -> None:
    found = adaptive_span.read(CASES / "adaptive_span_char.pt")
    assert (found.step, found.model.vocab_size, found.initial_lr) == (120, 61, 0.07)
    assert found.optimizer == {"optimizer": "adagrad", "lr": 0.07, "clip_grad": 0.03, "weight_decay": 0.0}
    assert found.model.shape == {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "persistent_memory_size": 32,
        "max_attention_span": 128,
        "adaptive_span": True,
        "variant": "all-attn",
        "feed_forward_size": 0,
    }
    found = adaptive_span.read(CASES / "adaptive_span_word.pt")
    adaptive = ("adaptive_cutoffs", "adaptive_div_value", "untie_embeddings_and_output_weights")
    assert [found.model.shape[name] for name in adaptive] == ["500,1500,3000", 4, False]
    assert found.optimizer | {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.999} == found.optimizer
    assert (found.step, found.model.vocab_size, found.optimizer["lr"]) == (60, 4716, 0.001)


def test_what_other_models_say(tmp_path: Path) -> None:
    found = {name: adaptive_span.read(file_of(name, tmp_path)) for name in SHAPES}
    assert {name: one.step for name, one in found.items()} == dict.fromkeys(SHAPES, STEP)
    shapes = {name: one.model.shape for name, one in found.items()}
    assert (shapes["transformer"]["variant"], shapes["transformer"]["feed_forward_size"]) == ("transformer", 40)
    assert not shapes["fixed span"]["adaptive_span"] and shapes["plain"]["adaptive_span"]
    assert shapes["no memory"]["persistent_memory_size"] == shapes["transformer"]["persistent_memory_size"] == 0
    assert (
        shapes["untied"]["untie_embeddings_and_output_weights"]
        and not shapes["tied"]["untie_embeddings_and_output_weights"]
    )
    assert (shapes["untied"]["adaptive_cutoffs"], shapes["untied"]["adaptive_div_value"]) == ("5", 2)
    assert (shapes["tied"]["adaptive_cutoffs"], shapes["tied"]["adaptive_div_value"]) == ("5,12", 4)
    assert [found[name].model.vocab_size for name in ("plain", "tied", "untied")] == [13, 32, 12]


def test_every_tensor_is_where_it_belongs(tmp_path: Path) -> None:
    """Tensor by tensor, in the file's own words."""
    saved = content(SHAPES["transformer"])
    model = {key.removeprefix("module."): value for key, value in saved["model"].items()}
    found = adaptive_span.read(save(tmp_path / "a.pt", saved))
    weights, attention = found.model.weights, "layers.1.attn"
    for name, key in {
        "position.key": "key_pe",
        "embedding.weight": "in_emb.weight",
        "output.bias": "out_emb.bias",
        "layers.1.query.weight": f"{attention}.proj_query.weight",
        "layers.1.key.weight": f"{attention}.proj_key.weight",
        "layers.1.value.weight": f"{attention}.proj_val.weight",
        "layers.1.out.weight": f"{attention}.proj_out.weight",
        "layers.1.span": f"{attention}.attn.adaptive_span._mask.current_val",
        "layers.0.ff.in.weight": "layers.0.ff.fc1.weight",
        "layers.0.ff.out.bias": "layers.0.ff.fc2.bias",
        "layers.0.norm1.weight": "layers.0.norm1.weight",
        "layers.0.norm2.bias": "layers.0.norm2.bias",
    }.items():
        assert torch.equal(weights[name], model[key]), name
    # key_pe 0, in_emb 1, out_emb 2-3; then a layer's span, query, out, val, key, norm1 (2), ff (4), norm2 (2)
    states = saved["optimizer"]["state"]
    for name, number in {"embedding.weight": 1, "layers.0.value.weight": 7, "layers.1.ff.in.bias": 4 + 13 + 8}.items():
        assert torch.equal(found.state[f"{name}/sum"], states[number]["sum"]), name


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_those_of_the_network(name: str, tmp_path: Path) -> None:
    found = adaptive_span.read(file_of(name, tmp_path))
    config = ModelConfig(**found.model.shape)
    shapes = logical_shapes(config, found.model.vocab_size)
    assert {key: tuple(tensor.shape) for key, tensor in found.model.weights.items()} == shapes
    assert len({entry.key for entry in entries(config)}) == len(entries(config))


@pytest.mark.parametrize(
    ("order", "number"), [(("attn", "ff", "norm1", "norm2"), 15), (("attn", "norm1", "norm2", "ff"), 11)]
)
def test_a_layer_may_have_its_norms_and_its_feed_forward_in_another_order(
    tmp_path: Path, order: tuple[str, ...], number: int
) -> None:
    """The optimizer's numbers are read off the file's order, which is kept for the way back."""
    saved = content(replace(SHAPES["transformer"], order=order))
    path = save(tmp_path / "a.pt", saved)
    found = adaptive_span.read(path)
    assert torch.equal(found.state["layers.0.norm2.weight/sum"], saved["optimizer"]["state"][number]["sum"])
    assert_equal(written(found, configured(path, found), found.source), saved)


def test_keys_without_the_wrapper(tmp_path: Path) -> None:
    saved = content(SHAPES["plain"])
    bare = saved | {"model": {key.removeprefix("module."): value for key, value in saved["model"].items()}}
    path = save(tmp_path / "a.pt", bare)
    found = adaptive_span.read(path)
    assert_equal(found.model.weights, adaptive_span.read(save(tmp_path / "b.pt", saved)).model.weights)
    assert_equal(written(found, configured(path, found), found.source), bare)


def test_files_of_older_releases_of_torch(tmp_path: Path) -> None:
    """Parameters went by their address, steps were ints, and there were fewer settings."""
    saved = content(SHAPES["plain"])
    modern = adaptive_span.read(save(tmp_path / "a.pt", saved))
    state, (group,) = saved["optimizer"]["state"], saved["optimizer"]["param_groups"]
    address = {number: 140_000_000_000 - 64 * number for number in state}
    kept = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "grad_clip")}
    saved["optimizer"] = {
        "state": {address[number]: one | {"step": STEP} for number, one in reversed(state.items())},
        "param_groups": [kept | {"params": list(address.values())}],
    }
    del saved["scheduler_iter"]
    torch.save(saved, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = adaptive_span.read(tmp_path / "old.pt")
    assert_equal(found.state, modern.state)
    assert (found.step, found.optimizer) == (STEP, modern.optimizer)
    assert "scheduler_iter" not in written(found, configured(tmp_path / "old.pt", found), found.source)


# Below: what is done to a file of the plain model, and what is said of it.
LAYER = "module.layers.1.attn.attn"


def _in(part: str, change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def apply(saved: dict[str, Any]) -> None:
        place = saved
        for key in part.split(".") if part else ():
            place = place[int(key) if key.isdecimal() else key]
        change(place)

    return apply


def _swap(model: dict[str, Any]) -> None:
    a, b = "module.layers.0.attn.proj_query.weight", "module.layers.0.attn.proj_key.weight"
    items = [({a: b, b: a}.get(key, key), value) for key, value in model.items()]
    model.clear()
    model.update(items)


def _longer_template(model: dict[str, Any]) -> None:
    for owner in ("", ".persistent_memory"):
        model[f"{LAYER}{owner}.adaptive_span._mask.mask_template"] = torch.arange(1.0 - 50, 1)


def _nudge(key: str, amount: float) -> Callable[[dict[str, Any]], object]:
    """Change one copy of a tensor."""
    return lambda model: model.update({key: model[key] + amount})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_in("", lambda s: s.pop("model")), "the file: key model is missing"),
        (_in("", lambda s: s.pop("iter_no")), "the file: key iter_no is missing"),
        (_in("", lambda s: s.update(extra=1)), "the file: key extra is unknown"),
        (_in("", lambda s: s.update(model=[])), "its `model` is not a dictionary of named tensors"),
        (_in("", lambda s: s.update(scheduler_iter=8)), "scheduler_iter is 8, its optimizer has made 7 updates"),
        (_in("", lambda s: s.update(scheduler_iter="7")), "scheduler_iter is '7', expected a whole number from 0"),
        (_in("", lambda s: s.update(iter_no="x")), "iter_no is 'x', expected a whole number from 0"),
        (_in("", lambda s: s.update(iter_no=10**20)), "iter_no is 100000000000000000000, expected a whole number"),
        (_in("", lambda s: s.update(logger={"a": torch.ones(2)})), "logger a: expected plain values, found a Tensor"),
        (_in("model", lambda m: m.pop("module.key_pe")), "model key key_pe: is missing"),
        (_in("model", lambda m: m.pop("module.layers.1.attn.proj_val.weight")), "lacks key layers.1.attn.proj_val.wei"),
        (
            _in("model", lambda m: m.pop("module.layers.0.attn.attn.persistent_memory.key")),
            "lacks key layers.0.attn.at",
        ),
        (
            _in("model", lambda m: m.pop(f"{LAYER}.adaptive_span._mask.mask_template")),
            "lacks key layers.1.attn.attn.ad",
        ),
        (_in("model", lambda m: m.pop("module.in_emb.weight")), "model key in_emb.weight: is missing"),
        (
            _in("model", lambda m: m.update({"module.layers.9.norm1.bias": torch.ones(32)})),
            "lacks key layers.2.attn.attn.adaptive_span._mask.current_val and ",
        ),
        (
            _in("model", lambda m: m.update({"module.layers.1.norm3.bias": torch.ones(32)})),
            "has the unknown key layers.1.norm3.bias",
        ),
        (
            _in("model", lambda m: m.update({"bias": torch.ones(3)})),
            "its `model` has key bias beside others behind module.",
        ),
        (
            _in("model", _nudge(f"{LAYER}.persistent_memory.adaptive_span._mask.current_val", 1e-6)),
            "model key layers.1.attn.attn.persistent_memory.adaptive_span._mask.current_val is not equal to its other",
        ),
        (
            _in("model", _nudge(f"{LAYER}.adaptive_span._mask.mask_template", 1.0)),
            "model key layers.1.attn.attn.adaptive_span._mask.mask_template is not −L+1 … 0",
        ),
        (_in("model", _longer_template), "mask_template has shape (50,), the others make it (48,)"),
        (
            _in("model", _swap),
            "model key layers.0.attn.proj_key.weight stands in the place of layers.0.attn.proj_query",
        ),
        (
            _in("model", lambda m: m.update({"module.layers.0.norm1.bias": torch.ones(33)})),
            "model key layers.0.norm1.bias has shape (33,), the others make it (32,)",
        ),
        (
            _in("model", lambda m: m.update({"module.out_emb.bias": torch.ones(13).half()})),
            "out_emb.bias is torch.float16",
        ),
        (_in("model", lambda m: m.update({"module.out_emb.bias": [0.0] * 13})), "out_emb.bias is no ordinary tensor"),
        (
            _in("model", lambda m: m.update({"module.key_pe": torch.zeros(1, 1, 1).expand(1, 8, 10**12)})),
            "model key key_pe is no ordinary tensor",
        ),
        (
            _in("model", lambda m: m.update({"module.key_pe": torch.empty(1, 8, 48, device="meta")})),
            "model key key_pe is no ordinary tensor",
        ),
        (
            _in("model", lambda m: m["module.out_emb.bias"].fill_(torch.nan)),
            "model key out_emb.bias holds NaN or infin",
        ),
        (_in("optimizer", lambda o: o.pop("state")), "optimizer: key state is missing"),
        (_in("optimizer", lambda o: o.update(more=1)), "optimizer: key more is unknown"),
        (_in("optimizer.state", lambda s: s.pop(3)), "does not hold one state for each of the model's 22 parameters"),
        (_in("optimizer.param_groups.0.params", lambda p: p.append(p[0])), "does not hold one state for each"),
        (_in("optimizer.param_groups", lambda g: g.append(g[0])), "has not one group of parameters"),
        (_in("optimizer.state.0", lambda s: s.pop("sum")), "are neither Adagrad's (step, sum) nor Adam's"),
        (_in("optimizer.state.2", lambda s: s.pop("sum")), "optimizer state of output.weight: key sum is missing"),
        (
            _in("optimizer.state.2", lambda s: s.update(sum=torch.ones(32, 13))),
            "optimizer state sum of output.weight has shape (32, 13), the weight (13, 32)",
        ),
        (
            _in("optimizer.state.2", lambda s: s.update(step=torch.tensor(6.0))),
            "has made 7 updates of position.key and 6 of output.weight",
        ),
        (
            _in("optimizer.state.2", lambda s: s.update(step=0.5)),
            "step of output.weight is 0.5, expected a whole number",
        ),
        (
            _in("optimizer.param_groups.0", lambda g: g.update(weight_decay=0.1)),
            "weight_decay is 0.1, here it is always 0",
        ),
        (_in("optimizer.param_groups.0", lambda g: g.update(lr_decay=0.1)), "lr_decay is 0.1, here it is always 0"),
        (_in("optimizer.param_groups.0", lambda g: g.update(eps=1e-8)), "eps is 1e-08, here it is always 1e-10"),
        (
            _in("optimizer.param_groups.0", lambda g: g.update(momentum=0.9)),
            "adagrad settings: key momentum is unknown",
        ),
        (_in("optimizer.param_groups.0", lambda g: g.pop("grad_clip")), "adagrad settings: key grad_clip is missing"),
        (
            _in("optimizer.param_groups.0", lambda g: g.update(lr=float("nan"))),
            "its optimizer's lr is nan, expected a n",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    saved = copy.deepcopy(content(SHAPES["plain"]))
    change(saved)
    path = save(tmp_path / "a.pt", saved)
    with pytest.raises(UsageError) as refusal:
        adaptive_span.read(path)
    text = str(refusal.value)
    assert str(path) in text and "\n" not in text
    assert message in text, text


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (replace(SHAPES["tied"], clusters=(32,), widths=(32,)), "there is one cluster only"),
        (
            replace(SHAPES["untied"], clusters=(5, 7, 9), widths=(32, 8, 4)),
            "the clusters' widths [32, 8, 4] are not 32",
        ),
        (Shape(inner=40), "--persistent-memory-size 6: --variant transformer has a feed-forward sublayer"),
    ],
)
def test_models_that_we_do_not_have(tmp_path: Path, shape: Shape, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        adaptive_span.read(save(tmp_path / "a.pt", content(shape)))
    assert message in str(refusal.value)


def test_a_half_tied_softmax_is_refused(tmp_path: Path) -> None:
    saved = copy.deepcopy(content(SHAPES["tied"]))
    _nudge("module.out_emb.out_projs.1", 1e-6)(saved["model"])
    with pytest.raises(UsageError, match=r"model key out_emb.out_projs.1: is not equal to the input's, though"):
        adaptive_span.read(save(tmp_path / "a.pt", saved))


@pytest.mark.parametrize(
    ("rate", "warmup", "said", "expected"),
    [
        (0.05, 0, False, 0.05),
        (0.05, 5, True, 0.05),
        (0.05 * 7 / 20, 20, True, 0.05),  # in the warm-up
        (0.005, 0, True, 0.005),  # started again with a tenth of the rate
        (0.005, 5, True, 0.005),
        (0.005, 0, False, None),  # one or the other
        (0.05, 20, True, None),  # the warm-up would not be over
        (0.005, 20, True, None),
    ],
)
def test_the_learning_rate_and_its_warm_up(
    tmp_path: Path, rate: float, warmup: int, said: bool, expected: float | None
) -> None:
    saved = content(SHAPES["plain"])
    saved["optimizer"]["param_groups"][0]["lr"] = rate
    path = save(tmp_path / "a.pt", saved)
    run = RunConfig(optimizer=OptimizerConfig(lr_warmup_iters=warmup))
    found, explicit = adaptive_span.read(path), frozenset({"--lr-warmup-iters"} if said else ())
    if expected is None:
        given = warmup if said else r"\(not given\)"
        rule = rf"--lr-warmup-iters {given}: .* at step 7 with rate {rate} of an initial"
        with pytest.raises(UsageError, match=rule):
            adaptive_span.configure(path, found, run, explicit)
    else:
        assert adaptive_span.configure(path, found, run, explicit).optimizer.lr == expected


def test_flags_and_recipes_must_not_contradict_the_file(tmp_path: Path) -> None:
    path = file_of("plain", tmp_path)
    found = adaptive_span.read(path)
    run = RunConfig(model=ModelConfig(num_layers=3, span_ramp=8, attention_dropout=0.3))
    configured = adaptive_span.configure(path, found, run, frozenset({"--span-ramp"}))
    assert (configured.model.num_layers, configured.model.span_ramp, configured.model.attention_dropout) == (2, 8, 0.3)
    assert (configured.optimizer.optimizer, configured.optimizer.clip_grad) == ("adagrad", 0.04)
    with pytest.raises(UsageError, match=r"--num-layers 3: .*a.pt has 2; leave it out"):
        adaptive_span.configure(path, found, run, frozenset({"--num-layers"}))
    with pytest.raises(UsageError, match=r"--num-layers 3: .*a.pt has 2; give --num-layers 2 or no --recipe"):
        adaptive_span.configure(path, found, replace(run, recipe="enwik8-small"), frozenset())


@pytest.mark.parametrize(
    ("section", "changed", "message"),
    [
        ("model", {"variant": "attn-split"}, "--variant attn-split: the paper's published code has no such model"),
        ("model", {"position_values": "shared"}, "--position-values shared: "),
        ("model", {"empty_cache": "mask"}, "--empty-cache mask: "),
        ("model", {"untie_embeddings_and_output_weights": False}, "--no-untie-embeddings-and-output-weights without"),
        ("optimizer", {"weight_decay": 0.1}, "--weight-decay 0.1: "),
    ],
)
def test_models_that_code_does_not_have(tmp_path: Path, section: str, changed: dict[str, Any], message: str) -> None:
    path = file_of("plain", tmp_path)
    found = adaptive_span.read(path)
    run = configured(path, found)
    run = replace(run, **{section: replace(getattr(run, section), **changed)})
    with pytest.raises(UsageError) as refusal:
        written(found, run, None)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "damage", "line"),
    [
        (
            "plain",
            lambda saved: saved["optimizer"]["state"][2]["sum"].view(-1)[1:3].fill_(-0.5),
            "state sum of .* -0.5",
        ),
        (
            "tied",
            lambda saved: saved["optimizer"]["state"][0]["exp_avg_sq"].view(-1)[3].fill_(-2),
            "exp_avg_sq of .* -2",
        ),
        (
            "plain",
            lambda saved: [
                v.view(-1)[1].fill_(1.5) for k, v in saved["model"].items() if "0.attn" in k and "val" in k[-4:]
            ],
            r"key module.layers.0.attn.attn.adaptive_span._mask.current_val holds 1.5, expected numbers from 0 to 1",
        ),
    ],
    ids=["adagrad", "adam", "span"],
)
def test_numbers_that_no_run_can_have_are_refused(
    tmp_path: Path, name: str, damage: Callable[[dict[str, Any]], object], line: str
) -> None:
    saved = content(SHAPES[name])
    damage(saved)
    with pytest.raises(UsageError, match=line.replace("module.", "").replace(" -", " holds -")):
        adaptive_span.read(save(tmp_path / "a.pt", saved))
