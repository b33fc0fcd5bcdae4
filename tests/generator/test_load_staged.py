"""The loader on models with SGLang's layouts in small: fused, stacked, padded; and on models that it must refuse."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from monarch_rl.generator import load_staged
from monarch_rl.generator.load_report import LoadSheet, Refusal
from monarch_rl.generator.load_staged import forget_prefixes, load, load_part, verify_rest, write_order
from tests.generator.helpers import Staging, expected_of, manifest_of
from tests.kernels import Kernels
from tests.recorded_streams import RecordedDevice


class Fused(nn.Module):
    """q, k fused by rows; two experts stacked; a padded vocabulary; a scalar per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((12, 6), torch.nan), requires_grad=False)
        self.experts = nn.Parameter(torch.full((2, 8, 5), torch.nan), requires_grad=False)
        self.vocabulary = nn.Parameter(torch.full((16, 4), torch.nan), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "vocabulary":
                self.vocabulary.data[:13].copy_(tensor)
                self.vocabulary.data[13:].fill_(0)
            elif name in ("q", "k"):
                start = 0 if name == "q" else 8
                self.qk.data.narrow(0, start, tensor.shape[0]).copy_(tensor)
            else:
                expert, part = int(name[1]), name[3:]
                self.experts.data[expert].narrow(0, 0 if part == "gate" else 4, 4).copy_(tensor)


def fused_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 6), "k": (4, 6), "vocabulary": (13, 4)}
    shapes |= {f"e{e}.{part}": (4, 5) for e in range(2) for part in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Rank:
    """One model, and the objects that an engine would hold for it."""

    def __init__(self, model: Any, weights: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.staging = Staging(weights)
        self.sheet = LoadSheet(self.staging.manifest, 1)

    def load(
        self, version: int, weights: dict[str, torch.Tensor], loader: Callable[..., None] = load
    ) -> Refusal | None:
        self.staging.fill(version, weights)
        self.sheet.ask(expected_of(weights))
        order = write_order(0, self.staging.area(version).handle, self.sheet.handle, 0)
        loader(self.model, [(order, torch.empty(0))])
        return self.sheet.judge()


def error_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> str:
    refusal = Rank(model, weights).load(0, weights)
    assert refusal is not None
    assert not refusal.differs
    return refusal.message


def test_weights_are_not_overwritten_before_the_steps_that_read_them_end() -> None:
    """Each load begins with a wait for the device: neither the first one, by SGLang's loader, nor a later one copies
    before that, and all copies of a load are complete when it answers."""
    device, rank = RecordedDevice(), Rank(Fused(), fused_weights())
    rank.load(0, fused_weights())  # creates the test's own checksums and handles
    rank.model.qk = nn.Parameter(rank.model.qk.clone(), requires_grad=False)  # the plan is void: it is rebuilt
    for version in (1, 2):
        weights = fused_weights(version)
        rank.staging.fill(version, weights)
        rank.sheet.ask(expected_of(weights))
        order = write_order(0, rank.staging.area(version).handle, rank.sheet.handle, 0)
        device.records.clear()
        with device.in_place_of_cuda(), device.recording():
            load(rank.model, [(order, torch.empty(0))])
        assert rank.sheet.judge() is None and rank.model.loads == 2
        copies = ("copy_", "_foreach_copy_")  # by SGLang's loader, and by the plan
        done = [record.op for record in device.records if record.op in (*copies, "synchronize")]
        assert done[0] == "synchronize" and copies[version - 1] in done


def test_the_first_load_uses_the_models_loader_and_later_ones_the_plan_whatever_the_area() -> None:
    rank = Rank(Fused(), fused_weights())
    for version in range(5):
        weights = fused_weights(version)
        assert rank.load(version, weights) is None
        assert rank.sheet.report().nbytes == sum(x.nbytes for x in weights.values())
        assert torch.equal(rank.model.qk.data, torch.cat([weights["q"], weights["k"]]))
        assert torch.equal(rank.model.experts.data[1], torch.cat([weights["e1.gate"], weights["e1.up"]]))
        assert torch.equal(rank.model.vocabulary.data[13:], torch.zeros(3, 4))
    assert rank.model.loads == 1


def test_later_loads_copy_bits_whatever_the_dtype() -> None:
    """A GPU's kernel that copies many tensors converts bfloat16 through float32, and a NaN loses its bits."""
    rank = Rank(Fused(), fused_weights())
    assert rank.load(0, fused_weights()) is None
    _, plan = load_staged._plans[rank.model]
    copied = [data for block in plan.checksums.blocks for data in block.data]
    assert copied and not any(data.dtype.is_floating_point for data in copied)


def test_checksums_cover_the_engines_parameters_and_not_the_area() -> None:
    class Forgetful(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.qk.data[0, 0].fill_(7.0)

    refusal = Rank(Forgetful(), fused_weights()).load(0, fused_weights())
    assert refusal == Refusal("1 of 7 tensors differ from the trainer's: q", differs=True)


@pytest.mark.parametrize("verified", [True, False])
def test_running_sequences_continue_only_with_the_trainers_weights(
    verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler itself ensures it: the engine's process, which refuses new requests, is notified later."""
    monkeypatch.setattr(load_staged, "_last_load", [])
    rank, continued = Rank(Fused(), fused_weights()), list[Any]()
    assert rank.load(0, fused_weights()) is None
    rank.sheet.expected[0] += not verified
    scheduler = SimpleNamespace(_pause_started_at=None, tree_cache=SimpleNamespace(evictable_size=lambda: 0))
    load_staged.continue_if_verified(scheduler, lambda *asked: continued.append(asked), "request")
    assert continued == ([(scheduler, "request")] if verified else [])


def test_a_parameter_that_moved_voids_the_plan() -> None:
    weights = fused_weights()
    rank = Rank(Fused(), weights)
    assert rank.load(0, weights) is None
    rank.model.qk = nn.Parameter(torch.full((12, 6), torch.nan), requires_grad=False)
    assert rank.load(1, weights) is None
    assert rank.model.loads == 2
    assert torch.equal(rank.model.qk.data[:8], weights["q"])


def test_replaced_areas_need_no_new_plan() -> None:
    rank = Rank(Fused(), fused_weights(0))
    assert rank.load(0, fused_weights(0)) is None
    rank.staging = Staging(fused_weights(0), areas=3)
    for version in range(6):
        assert rank.load(version, fused_weights(version)) is None
        assert torch.equal(rank.model.qk.data[:8], fused_weights(version)["q"])
    assert rank.model.loads == 1


def test_a_tensor_the_engine_does_not_take_is_named() -> None:
    class Tied(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights([(name, tensor) for name, tensor in weights if name != "lm_head"])

    error = error_of(Tied(), fused_weights() | {"lm_head": torch.ones(13, 4)})
    assert "lm_head" in error
    assert "tied" in error


def test_a_parameter_that_nothing_fills_is_named() -> None:
    class Larger(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)

    assert re.search(r"fills .*: bias\b", error_of(Larger(), fused_weights()))


def test_a_partial_version_needs_the_rest_to_be_verified() -> None:
    """q and one of the experts' halves; the rest has other tensors, and shares their parameters."""
    whole = fused_weights()
    model = Fused()
    assert Rank(model, whole).load(0, whole) is None
    part = {name: x for name, x in fused_weights(1).items() if name == "q" or name.endswith("gate")}
    others = {name: x for name, x in whole.items() if name not in part}
    unfilled = error_of(model, part)
    assert ": vocabulary" in unfilled and "verified" not in unfilled
    sent = Rank(model, part)
    refusal = sent.load(1, part, load_part)
    assert refusal is not None
    assert re.search("verified .*: vocabulary", refusal.message)
    rest = Rank(model, others)
    wrong = others | {"k": others["k"] + 1}
    assert rest.load(0, wrong, verify_rest) == Refusal("1 of 4 tensors differ from the trainer's: k", differs=True)
    assert rest.load(0, others, verify_rest) is None
    for version in (1, 2, 3):
        part = {name: x for name, x in fused_weights(version).items() if name in part}
        assert sent.load(version, part, load_part) is None
        assert sent.sheet.report().nbytes == sum(x.nbytes for x in part.values())
        assert torch.equal(model.qk.data, torch.cat([part["q"], whole["k"]]))
        assert torch.equal(model.experts.data[1], torch.cat([part["e1.gate"], whole["e1.up"]]))
        assert torch.equal(model.vocabulary.data[:13], whole["vocabulary"])


def test_a_parameter_stored_transposed_is_refused() -> None:
    class Transposed(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights([(n, t) for n, t in weights if n != "vocabulary"])
            self.vocabulary.data.view(4, 16)[:, :13].copy_(dict(weights)["vocabulary"].t())

    error = error_of(Transposed(), fused_weights())
    assert "does not store vocabulary row by row" in error


def test_a_loader_that_computes_is_refused() -> None:
    class Shifted(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.qk.data.add_(1.0)

    assert "qk (add_)" in error_of(Shifted(), fused_weights())


def test_tensors_that_a_loader_concatenates_by_rows_are_located() -> None:
    class Concatenating(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            given = dict(weights)
            self.qk.data.copy_(torch.cat([given.pop("q"), given.pop("k")]))
            super().load_weights(list(given.items()))

    rank = Rank(Concatenating(), fused_weights())
    for version in range(3):
        weights = fused_weights(version)
        assert rank.load(version, weights) is None
        assert torch.equal(rank.model.qk.data, torch.cat([weights["q"], weights["k"]]))
    assert rank.model.loads == 1


def test_a_loader_that_stores_part_of_a_concatenation_is_refused() -> None:
    class ConcatenatingPart(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            given = dict(weights)
            self.qk.data[:6].copy_(torch.cat([given.pop("q"), given.pop("k")])[3:9])
            super().load_weights(list(given.items()))

    assert "qk (copy_)" in error_of(ConcatenatingPart(), fused_weights())


def test_a_dtype_other_than_the_engines_is_refused() -> None:
    weights = fused_weights()
    error = error_of(Fused(), weights | {"q": weights["q"].to(torch.bfloat16)})
    assert "does not serve: q." in error
    assert "torch.float32" in error


def test_an_exception_of_the_model_is_reported_and_not_raised() -> None:
    class Broken(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            raise KeyError("no such layer")

    assert "no such layer" in error_of(Broken(), fused_weights())


class Sliced(nn.Module):
    """The shard of one of two ranks of three projections and a norm: rows, columns, rows of a padded one, all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.up, self.down, self.vocabulary, self.norm = (
            nn.Parameter(torch.full(shape, torch.nan), requires_grad=False) for shape in ((4, 6), (6, 4), (8, 4), (5,))
        )

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        given, rank = dict(weights), self.rank
        self.up.data.copy_(given["up"].narrow(0, 4 * rank, 4))
        self.down.data.copy_(given["down"].narrow(1, 4 * rank, 4))
        rows = given["vocabulary"][8 * rank : 8 * rank + 8]
        self.vocabulary.data[: len(rows)].copy_(rows)
        self.vocabulary.data[len(rows) :].fill_(0)
        self.norm.data.copy_(given["norm"])


def sliced_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up": (8, 6), "down": (6, 8), "vocabulary": (13, 4), "norm": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_both(
    models: list[Any], staging: Staging, sheet: LoadSheet, version: int, weights: dict[str, torch.Tensor]
) -> Refusal | None:
    staging.fill(version, weights)
    sheet.ask(expected_of(weights))
    for rank, model in enumerate(models):
        load(model, [(write_order(rank, staging.area(version).handle, sheet.handle, 0), torch.empty(0))])
    return sheet.judge()


def test_ranks_hold_rows_columns_or_all_and_verify_together() -> None:
    models: list[Any] = [Sliced(0), Sliced(1)]
    staging = Staging(sliced_weights(0))
    sheet = LoadSheet(staging.manifest, 2)
    for version in range(3):
        weights = sliced_weights(version)
        assert load_both(models, staging, sheet, version, weights) is None
        for name, dim in (("up", 0), ("down", 1)):
            assert torch.equal(torch.cat([getattr(m, name).data for m in models], dim), weights[name])
        assert torch.equal(torch.cat([m.vocabulary.data for m in models])[:13], weights["vocabulary"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["up", "down", "vocabulary", "norm"])
def test_one_wrong_bit_on_one_rank_alone_is_named(rank: int, name: str) -> None:
    class Wrong(Sliced):
        def post_load_weights(self) -> None:
            getattr(self, name).data.view(torch.int32).view(-1)[2] ^= 1

    models: list[Any] = [Sliced(0), Sliced(1)]
    models[rank] = Wrong(rank)
    staging = Staging(sliced_weights(0))
    sheet = LoadSheet(staging.manifest, 2)
    assert load_both(models, staging, sheet, 0, sliced_weights(0)) is None  # by load_weights alone
    refusal = load_both(models, staging, sheet, 1, sliced_weights(1))
    assert refusal == Refusal(f"1 of 4 tensors differ from the trainer's: {name}", differs=True)


class Stacked(nn.Module):
    """The shard of one of two ranks of stacked experts: rows of gate and up in one parameter, columns of down."""

    def __init__(self, rank: int, experts: int) -> None:
        super().__init__()
        self.rank = rank
        self.w13 = nn.Parameter(torch.full((experts, 8, 6), torch.nan), requires_grad=False)
        self.w2 = nn.Parameter(torch.full((experts, 6, 4), torch.nan), requires_grad=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            part, expert = name.split(".")
            if part == "down":
                self.w2.data[int(expert)].copy_(value.narrow(1, 4 * self.rank, 4))
            else:
                first = 0 if part == "gate" else 4
                self.w13.data[int(expert)].narrow(0, first, 4).copy_(value.narrow(0, 4 * self.rank, 4))


def stacked_weights(seed: int, experts: int) -> dict[str, torch.Tensor]:
    """In the trainer's order: one projection of all experts after the other."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (8, 6), "up": (8, 6), "down": (6, 8)}
    return {f"{part}.{e}": torch.randn(shapes[part], generator=generator) for part in shapes for e in range(experts)}


@pytest.mark.parametrize("small_share", [32, 1 << 18])
def test_a_commit_takes_as_many_kernels_for_many_experts_as_for_few(
    small_share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are gathered as small ones or not; every expert is copied, on both ranks."""
    monkeypatch.setattr("monarch_rl.weights.checksum._SMALL_SHARE", small_share)
    counted = []
    for experts in (2, 90):
        models: list[Any] = [Stacked(0, experts), Stacked(1, experts)]
        staging = Staging(stacked_weights(0, experts))
        sheet = LoadSheet(staging.manifest, 2)
        for version in range(3):
            weights = stacked_weights(version, experts)
            assert load_both(models, staging, sheet, version, weights) is None
            for e in range(experts):
                assert torch.equal(torch.cat([model.w13[e, :4] for model in models]), weights[f"gate.{e}"])
                assert torch.equal(torch.cat([model.w13[e, 4:] for model in models]), weights[f"up.{e}"])
                assert torch.equal(torch.cat([model.w2[e] for model in models], 1), weights[f"down.{e}"])
        staging.fill(3, weights)
        orders = [write_order(rank, staging.area(3).handle, sheet.handle, 0) for rank in range(2)]
        with Kernels() as kernels:
            for model, order in zip(models, orders, strict=True):
                load(model, [(order, torch.empty(0))])
        counted.append(kernels.count)
    assert counted[0] == counted[1] < 100


@pytest.mark.parametrize("small_share", [32, 1 << 18])
@pytest.mark.parametrize("name", ["gate.7", "up.0", "down.8"])
def test_one_wrong_bit_of_one_expert_on_one_rank_is_named(
    name: str, small_share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although experts are summed together."""
    monkeypatch.setattr("monarch_rl.weights.checksum._SMALL_SHARE", small_share)
    part, expert = name.split(".")

    class Wrong(Stacked):
        def post_load_weights(self) -> None:
            held = {"gate": self.w13[:, :4], "up": self.w13[:, 4:], "down": self.w2}[part]
            held[int(expert)].view(torch.int32)[2, 1] ^= 1 << 30

    models: list[Any] = [Stacked(0, 9), Wrong(1, 9)]
    staging = Staging(stacked_weights(0, 9))
    sheet = LoadSheet(staging.manifest, 2)
    assert load_both(models, staging, sheet, 0, stacked_weights(0, 9)) is None  # by load_weights alone
    refusal = load_both(models, staging, sheet, 1, stacked_weights(1, 9))
    assert refusal == Refusal(f"1 of 27 tensors differ from the trainer's: {name}", differs=True)


def test_ranks_that_leave_out_a_part_are_refused() -> None:
    models: list[Any] = [Sliced(0), Sliced(0)]
    staging = Staging(sliced_weights(0))
    refusal = load_both(models, staging, LoadSheet(staging.manifest, 2), 0, sliced_weights(0))
    assert refusal is not None
    assert not refusal.differs
    assert ": up, down, vocabulary" in refusal.message


def test_a_rank_that_never_loaded_is_no_success() -> None:
    weights = sliced_weights(0)
    staging = Staging(weights)
    sheet = LoadSheet(staging.manifest, 2)
    staging.fill(0, weights)
    sheet.ask(expected_of(weights))
    load(Sliced(1), [(write_order(1, staging.area(0).handle, sheet.handle, 0), torch.empty(0))])
    assert sheet.judge() == Refusal("engine rank 0: the loader did not run", differs=False)


def test_specs_survive_serialization() -> None:
    sheet = LoadSheet(manifest_of(fused_weights() | {"s": torch.ones((), dtype=torch.bfloat16)}), 3)
    assert LoadSheet.open(sheet.handle).specs == sheet.specs


class Allocator:
    """The allocator through which SGLang's prefix cache frees tokens."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, value: torch.Tensor, start_pos: int) -> None:
        self.freed += value.tolist()


def test_after_a_commit_the_prefix_cache_holds_only_prefixes_of_running_requests() -> None:
    """SGLang's own cache. Otherwise prefixes of hundreds of versions, never requested again, would fill it."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    allocator = Allocator()
    cache = RadixCache.create_simulated(mock_allocator=allocator)
    keys = [RadixKey(array("q", [1, 2, 3, last]), extra_key=version) for version in ("6", "7") for last in (4, 5)]
    for place, key in enumerate(keys):
        cache.insert(InsertParams(key=key, value=torch.arange(10 * place, 10 * place + 4)))
    running = cache.match_prefix(MatchPrefixParams(key=keys[0])).last_device_node
    cache.inc_lock_ref(running)
    forget_prefixes(cache)
    assert cache.total_size() == cache.protected_size() == 4 and cache.evictable_size() == 0
    assert cache.match_prefix(MatchPrefixParams(key=keys[0])).device_prefix_len == 4
    assert sorted(allocator.freed) == [13, 20, 21, 22, 23, 33]
    cache.dec_lock_ref(running)
    forget_prefixes(cache)
    assert cache.total_size() == 0


def test_recently_used_prefixes_survive_for_open_conversations() -> None:
    """SGLang's own cache: entries of three ages, of which one continues another."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    def held(ids: list[int]) -> int:
        return int(cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids)))).device_prefix_len)

    cache = RadixCache.create_simulated(mock_allocator=Allocator())
    for ids in ([1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 8, 9]):
        cache.insert(InsertParams(key=RadixKey(array("q", ids)), value=torch.tensor(ids)))
    forget_prefixes(cache, 9)
    assert cache.total_size() == 9
    forget_prefixes(cache, 8)  # the first was used for the third, and the second was not
    assert held([1, 2, 3, 8, 9]) == cache.total_size() == 5
