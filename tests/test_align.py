"""The loop of STARFISH against a textbook one, its schedule, its settings."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import starfish
import starfish.masks
from cases import Case, tiny_cnn, tiny_vit
from starfish.activations import Recorder
from starfish.heal import job_of
from starfish.methods import PAPER
from starfish.methods.align import BATCHNORM_POLICIES
from starfish.pruners.magnitude import Magnitude

FIXED = replace(PAPER, epochs=3, batch_size=5, shuffle=False, precision="fp32", granularity="token")


def textbook(dense: nn.Module, masks: starfish.Masks, images: Tensor, epochs: int, batch_size: int) -> list[float]:
    """methods.md 12.1, word for word, on a timm ViT: the loss of every step."""
    student = deepcopy(dense)
    weights = {name: p for name, p in student.named_parameters() if name in masks}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in masks)
        if name in masks:
            parameter.data *= masks[name]
    outputs: dict[nn.Module, list[Tensor]] = {dense: [], student: []}
    for model in (dense, student):
        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda _m, _i, out, model=model: outputs[model].append(out))
    optimizer = torch.optim.AdamW(weights.values(), lr=6e-4, weight_decay=0)
    steps, losses = epochs * math.ceil(len(images) / batch_size), []
    for step in range(steps):
        start = step % math.ceil(len(images) / batch_size) * batch_size
        for group in optimizer.param_groups:
            group["lr"] = 1e-6 + 0.5 * (6e-4 - 1e-6) * (1 + math.cos(math.pi * step / steps))
        for model in (dense, student):
            outputs[model].clear()
            model(images[start : start + batch_size])
        pairs = zip(outputs[student], outputs[dense], strict=True)
        loss = torch.stack([1 - nn.functional.cosine_similarity(a, b.detach(), dim=-1).mean() for a, b in pairs]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, weight in weights.items():
            weight.grad *= masks[name]
        optimizer.step()
        for name, weight in weights.items():
            weight.data *= masks[name]
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("masks", ["vit-unstructured", "vit-2:4", "vit-qk"])
def test_losses_equal_the_textbook_loop(masks: str, images: Tensor) -> None:
    """With fp32, fixed order and token granularity every step's loss agrees to 1e-5."""
    model, dense, chosen, _ = Case("starfish", masks).build(images)
    result = starfish.heal_(model, dense, chosen, images, FIXED)
    expected = textbook(dense, chosen, images, epochs=3, batch_size=5)
    assert [row["loss"] for row in result.rows] == pytest.approx(expected, abs=1e-5)
    assert len(expected) == 9


def test_schedule_end_points() -> None:
    """The first step runs at lr, and min_lr is reached where the next step would be."""
    method = starfish.Starfish(lr=3e-3, min_lr=1e-5)
    assert method.rate(0, 40) == pytest.approx(3e-3, rel=1e-12)
    assert method.rate(40, 40) == pytest.approx(1e-5, rel=1e-9)
    assert method.rate(20, 40) == pytest.approx((3e-3 + 1e-5) / 2, rel=1e-12)


def test_warmup_rises_in_a_line_to_the_schedule() -> None:
    method = starfish.Starfish(lr=1e-3, warmup_steps=4)
    assert [method.rate(step, 20) for step in range(5)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("granularity", ["token", "sample", "channel-position"])
def test_granularity_changes_the_loss_only_between_token_and_sample(granularity: str, images: Tensor) -> None:
    """channel-position is what token is called in a convolutional network."""
    losses = {}
    for one in ("token", granularity):
        model, dense, masks, _ = Case("starfish", "cnn-unstructured").build(images)
        method = replace(FIXED, granularity=one, bn="freeze", epochs=1)
        losses[one] = starfish.heal_(model, dense, masks, images, method).rows[0]["loss"]
    assert (losses["token"] == losses[granularity]) == (granularity != "sample")


def test_open_settings_are_settled_by_architecture(images: Tensor) -> None:
    """32 images and tokens with attention; 64 and whole samples without; the result says which."""
    found = {}
    for masks in ("vit-unstructured", "cnn-unstructured"):
        model, dense, chosen, _ = Case("starfish", masks).build(images)
        settings = starfish.heal_(model, dense, chosen, images, starfish.Starfish(epochs=1)).settings
        found[masks] = (settings["batch_size"], settings["granularity"])
        assert settings["precision"] in {"fp32", "bf16"}
        assert settings["bn"] in BATCHNORM_POLICIES
    assert found == {"vit-unstructured": (32, "token"), "cnn-unstructured": (64, "sample")}


def test_order_is_new_each_epoch_and_depends_on_the_seed(images: Tensor) -> None:
    """Reshuffled: epochs differ. Fixed: epochs are alike. Another seed: another order."""

    def first_losses(shuffle: bool, seed: int) -> list[float]:
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        method = replace(FIXED, shuffle=shuffle, lr=1e-30, min_lr=0.0, epochs=2, batch_size=4)
        return [float(row["loss"]) for row in starfish.heal_(model, dense, masks, images, method, seed=seed).rows]

    fixed = first_losses(False, 0)
    assert fixed[:3] == fixed[3:]
    shuffled = first_losses(True, 0)
    assert shuffled[:3] != shuffled[3:]
    assert shuffled == first_losses(True, 0)
    assert shuffled != first_losses(True, 1)


def test_bf16_follows_fp32(images: Tensor) -> None:
    """Autocast changes the losses by little, and the loss itself stays float32 (no steps of 1/256)."""
    losses = {}
    for precision in ("fp32", "bf16"):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        result = starfish.heal_(model, dense, masks, images, replace(FIXED, precision=precision))
        losses[precision] = torch.tensor([row["loss"] for row in result.rows])
    assert torch.allclose(losses["fp32"], losses["bf16"], rtol=0.05)
    assert not torch.equal(losses["fp32"], losses["bf16"])
    assert not torch.equal(losses["bf16"], losses["bf16"].bfloat16().float())


def test_clipping_acts_on_the_masked_gradient(images: Tensor) -> None:
    """Pruned entries do not count in the norm: with a huge pruned gradient the kept ones are not shrunk by it."""
    from starfish.methods.align import _mask_gradients_

    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.tensor([1.0, 1e6, 1.0, 1e6])
    _mask_gradients_({"w": weight}, {"w": torch.tensor([True, False, True, False])})
    assert weight.grad.tolist() == [1, 0, 1, 0]
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    free = starfish.heal_(deepcopy(model), dense, masks, images, replace(FIXED, optimizer="sgd"))
    tight = starfish.heal_(deepcopy(model), dense, masks, images, replace(FIXED, optimizer="sgd", clip=1e-6))
    assert tight.loss["last"] != free.loss["last"]


def test_frozen_v_rows_stay(images: Tensor) -> None:
    """train_v=False keeps the V rows of a fused qkv weight; by default they are trained, as by the authors' code."""
    for train_v in (True, False):
        model, dense, masks, _ = Case("starfish", "vit-qk").build(images)
        starfish.heal_(model, dense, masks, images, replace(FIXED, train_v=train_v, lr=1e-2))
        rows = slice(48, 72)
        same = torch.equal(model.blocks[0].attn.qkv.weight[rows], dense.blocks[0].attn.qkv.weight[rows])
        assert same != train_v
        assert not torch.equal(model.blocks[0].attn.qkv.weight[:24], dense.blocks[0].attn.qkv.weight[:24])


@pytest.mark.parametrize(
    ("change", "unchanged"), [({"tail": False}, ["linear.weight"]), ({"tail": True}, []), ({"objective": "kl"}, [])]
)
def test_weights_after_the_last_block_are_reported(
    change: dict[str, object], unchanged: list[str], images: Tensor
) -> None:
    """Aligning blocks cannot reach the classifier, which keeps its masked values; its own output, or KL, can."""
    dense = tiny_cnn()
    masks = starfish.prune(dense, Magnitude(0.5, scope="conv+head"), images)
    model = deepcopy(dense)
    method = replace(FIXED, bn="freeze", **change)  # type: ignore[arg-type]
    assert starfish.heal_(model, dense, masks, images, method).unchanged == unchanged


def test_dropout_never_acts(images: Tensor) -> None:
    """A model with dropout heals as the same model without."""
    losses = []
    for rate in (0.0, 0.5):
        dense = tiny_vit()
        for module in dense.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
        masks = starfish.prune(dense, Magnitude(0.6), images)
        losses.append([row["loss"] for row in starfish.heal_(deepcopy(dense), dense, masks, images, FIXED).rows])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("policy", BATCHNORM_POLICIES)
def test_batchnorm_statistics_move_only_as_asked(policy: str, images: Tensor) -> None:
    """freeze leaves them bit-identical; the other policies change running statistics and nothing else."""
    model, dense, masks, _ = Case("starfish", "cnn-unstructured").build(images)
    result = starfish.heal_(model, dense, masks, images, replace(FIXED, bn=policy))
    moved = {n for n, t in model.state_dict().items() if n not in masks and not torch.equal(t, dense.state_dict()[n])}
    assert all("running_" in name or "num_batches" in name for name in moved)
    assert bool(moved) == (policy != "freeze")
    assert moved <= set(result.also_changed)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"objective": "cos"}, "`objective` is `cos`"),
        ({"optimizer": "adamm"}, "`optimizer` is `adamm`"),
        ({"granularity": "pixel"}, "`granularity` is `pixel`"),
        ({"bn": "on"}, "`bn` is `on`"),
        ({"precision": "fp64"}, "the precision is `fp64`"),
        ({"epochs": -1}, "`epochs` is -1"),
        ({"head": 1.5}, "`head` is 1.5"),
        ({"views": 1, "augment": "flip"}, "with `views` 1 images are shown as they are"),
        ({"views": 2, "augment": "mixup"}, "`mixup` mixes the images of a batch"),
        ({"lr": -1.0}, "`lr` is -1.0"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, object], complaint: str, images: Tensor) -> None:
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    with pytest.raises(starfish.UserError, match=complaint):
        starfish.heal_(model, dense, masks, images, replace(FIXED, **change))  # type: ignore[arg-type]


def test_divergence_stops_the_run_by_name(images: Tensor) -> None:
    """A loss that is no number ends the heal with the step and the way out."""
    model, dense, masks, _ = Case("mse", "vit-unstructured").build(images)
    method = starfish.Starfish(objective="mse", optimizer="sgd", lr=1e30, epochs=3, batch_size=4, precision="fp32")
    with pytest.raises(starfish.UserError, match=r"became (nan|inf) at step") as caught:
        starfish.heal_(model, dense, masks, images, method)
    assert "learning rate" in caught.value.hint


def test_view_compares_what_the_next_block_reads(images: Tensor) -> None:
    """The first loss with view=next_norm is the cosine loss of both outputs through the dense model's next norm."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    student = deepcopy(model)
    starfish.masks.apply_(student, masks)
    method = replace(FIXED, view="next_norm", epochs=1, batch_size=12)
    found = starfish.heal_(model, dense, masks, images, method).rows[0]["loss"]
    outputs: list[list[Tensor]] = [[], []]
    for side, net in zip(outputs, (student, dense), strict=True):
        for block in net.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda _m, _i, out, side=side: side.append(out))
        net(images)
    norms = [dense.blocks[1].norm1, dense.norm]  # type: ignore[index,union-attr]
    losses = [1 - nn.functional.cosine_similarity(norm(a), norm(b), dim=-1).mean().detach()  # type: ignore[operator]
              for norm, a, b in zip(norms, *outputs, strict=True)]  # fmt: skip
    assert found == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)
    raw = starfish.heal_(deepcopy(student), dense, masks, images, replace(method, view="raw")).rows[0]["loss"]
    assert abs(float(raw) - float(found)) > 1e-4


@pytest.mark.parametrize(("train", "kinds"), [
    ("weights", set()), ("weights+biases", {"mlp.fc1.bias", "mlp.fc2.bias", "attn.qkv.bias", "attn.proj.bias"}),
    ("weights+norms", {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}),
])  # fmt: skip
def test_train_frees_what_it_says(train: str, kinds: set[str], images: Tensor) -> None:
    """Biases of masked layers and norms of blocks move where asked for, are declared, and nothing else is."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    result = starfish.heal_(model, dense, masks, images, replace(FIXED, train=train))
    expected = {f"blocks.{block}.{kind}" for block in (0, 1) for kind in kinds}
    assert set(result.also_changed) == expected
    before = dense.state_dict()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved - masks.keys() == expected


def test_augmented_views_are_answered_anew_and_resume_alike(images: Tensor) -> None:
    """Without views no targets are kept; the same seed gives the same losses, another view others."""
    losses = {}
    for augment in ("none", "flip", "flip", "mixup:1"):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        rows = starfish.heal_(model, dense, masks, images, replace(FIXED, augment=augment, views=0)).rows
        found = [row["loss"] for row in rows]
        assert losses.setdefault(augment, found) == found
    assert len({tuple(found) for found in losses.values()}) == 3


def test_kept_views_are_the_images_and_their_mirror_images_in_turns(images: Tensor) -> None:
    """With two views of which one is mirrored, a still student sees in two epochs both of each image once."""
    still = replace(FIXED, lr=1e-30, min_lr=0.0, epochs=2, batch_size=4, augment="flip:1", views=2)
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    rows = starfish.heal_(model, dense, masks, images, still).rows
    seen = sum(float(row["loss"]) for row in rows) / len(rows)
    losses = []
    for shown in (images, images.flip(-1)):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        one = starfish.heal_(model, dense, masks, shown, replace(still, epochs=1, augment="none")).rows
        losses.append(sum(float(row["loss"]) for row in one) / len(one))
    assert seen == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


def test_head_positions_have_a_share_of_their_own(images: Tensor) -> None:
    """(1 − head) times the mean over all tokens and head times that of the class token; as any other where it is 0."""
    losses = {}
    for head in (0.0, 0.25, 1.0):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        still = replace(FIXED, lr=1e-30, min_lr=0.0, epochs=1, batch_size=12, head=head)
        losses[head] = float(starfish.heal_(model, dense, masks, images, still).rows[0]["loss"])
    assert losses[0.25] == pytest.approx(0.75 * losses[0.0] + 0.25 * losses[1.0], rel=1e-5)
    assert losses[1.0] != pytest.approx(losses[0.0], rel=1e-3)
    blocks = ("blocks.0", "blocks.1")
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    starfish.masks.apply_(model, masks)
    tokens = []
    for net in (model, dense):
        with torch.no_grad(), Recorder(net, blocks) as recorder:
            net(images)
            tokens.append(torch.stack([x[:, 0] for x in recorder.take().values()]))
    assert losses[1.0] == pytest.approx(1 - float(torch.cosine_similarity(*tokens, dim=-1).mean()), rel=1e-4)


def test_epochs_follow_the_number_of_images(images: Tensor) -> None:
    """About 448 steps of 32 images, and never more than 64 times the same image or fewer than ten."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    epochs = {}
    for copies in (1, 100, 1000):
        job = job_of(model, dense, masks, images.repeat(copies, 1, 1, 1))
        epochs[copies * 12] = starfish.Starfish().settle(job).epochs
    assert epochs == {12: 64, 1200: 12, 12000: 10}


def test_default_recipe_is_settled_by_the_inputs(images: Tensor) -> None:
    """Images are mirrored and Muon has its rate; inputs that are no images are left as they are."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    settled = starfish.Starfish().settle(job_of(model, dense, masks, images))
    assert (settled.augment, settled.lr, settled.optimizer) == ("flip:1", 2e-3, "muon")
    assert replace(settled, lr=0.0, optimizer="adamw").settle(job_of(model, dense, masks, images)).lr == 6e-4
    assert starfish.METHODS["kl"].settle(job_of(model, dense, masks, images)).augment == "none"


@pytest.mark.parametrize(
    ("field", "value"), [("view", "next"), ("train", "weight"), ("augment", "blur"), ("optimizer", "lion")]
)
def test_unknown_choices_are_refused_by_name(field: str, value: str, images: Tensor) -> None:
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    with pytest.raises(starfish.UserError, match=value):
        starfish.heal_(model, dense, masks, images, replace(FIXED, **{field: value}))  # type: ignore[arg-type]
