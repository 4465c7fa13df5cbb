"""The command line: every command parses, calls and prints. Torch is imported inside commands only."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from starfish.console import Interrupted, emit, say, table, watch
from starfish.errors import UserError, listed
from starfish.views import show_anatomy, show_scores, show_stages, show_summary

if TYPE_CHECKING:
    from torch import nn

    from starfish.core import Anatomy, Job, Masks
    from starfish.data import Preprocess, StoredImages
    from starfish.models import Loaded

app = typer.Typer(
    name="starfish",
    help="Heal pruned neural networks: lost accuracy comes back in minutes, without labels or the training set.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="timm/NAME, torchvision/NAME, hf/NAME, local-dir:FOLDER, package.module:factory"
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="Load the dense weights from this file, not from the net.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pickled files, which can run code. Only if you trust them.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="K=V", help="A setting of the method, pruner or preprocessing.")
]
Blocks = Annotated[
    str | None, typer.Option(metavar="REGEX", help="The modules to align, where starfish does not find them.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps …")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Seed = Annotated[int, typer.Option(help="Of the image sample and the order of batches.")]


def main() -> None:
    """The one place where exceptions become output and exit codes."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads that spin make a shared machine crawl
    try:
        app(standalone_mode=False)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except UserError as error:
        say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        say("interrupted; a heal goes on where it stopped when you add --resume")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own usage errors
            error.show()
            sys.exit(error.exit_code)
        if "torchvision::nms" in str(error):
            say("error: torchvision does not fit this torch\nhint: `starfish doctor` says what to install")
            sys.exit(2)
        raise


@app.command()
def prune(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the masks go.")],
    sparsity: Annotated[float | None, typer.Option(help="Fraction of the weights in the scope to remove.")] = None,
    pattern: Annotated[str | None, typer.Option(help="unstructured, or N:M such as 2:4.")] = None,
    scope: Annotated[
        str | None,
        typer.Option(help="Which weights: qkv, out, mlp, qk, v, conv, depthwise, head, joined by +; conv_fc …; all."),
    ] = None,
    pruner: Annotated[str, typer.Option(help="`starfish pruners` lists them.")] = "magnitude",
    images: Annotated[str | None, typer.Option(help="Images, for pruners that look at data.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take so many images.")] = None,
    sets: Set = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Choose which weights go, and write the masks."""
    from starfish import masks as masks_module
    from starfish.patterns import summarise
    from starfish.pruners import PRUNERS

    _suffix(output, ".safetensors")
    named = {"sparsity": sparsity, "pattern": pattern, "scope": scope}
    given = [f"{pruner}.{name}={value}" for name, value in named.items() if value is not None]
    chosen = _chosen(PRUNERS, "pruner", pruner)
    loaded, stages = _load(model, checkpoint, allow_pickle, device, {pruner: chosen}, [*given, *(sets or [])])
    chosen = stages[pruner]
    if chosen.needs() and images is None:
        raise UserError(f"the pruner `{pruner}` looks at data", "give it some with --images")
    pictures = _pictures(images, stages["preprocess"], loaded, limit=limit, seed=seed) if images else None
    anatomy = _anatomy(loaded, pictures, blocks)
    masks = chosen.choose(loaded.model, anatomy, pictures)
    masks_module.write(output, masks)
    summary = summarise(masks, anatomy)
    facts = {
        "masks": str(output),
        "pruner": pruner,
        "settings": asdict(chosen),
        "model": loaded.name,
        **asdict(summary),
    }
    if json:
        emit(facts)
    else:
        show_summary(summary)
        say(f"wrote {output}")


@app.command()
def heal(
    model: Model,
    images: Annotated[
        str, typer.Option(help="Unlabeled images: a folder, folders by class, a .npz or .safetensors file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder.")],
    masks: Annotated[Path | None, typer.Option(help="Masks, in any container `starfish inspect` reads.")] = None,
    pruned: Annotated[
        Path | None, typer.Option(help="A pruned checkpoint: its zeros are the mask, its weights the start.")
    ] = None,
    method: Annotated[str, typer.Option(help="`starfish methods` lists them.")] = "starfish",
    recipe: Annotated[str, typer.Option(help="default, or paper for the paper's settings to the letter.")] = "default",
    sets: Set = None,
    limit: Annotated[int | None, typer.Option(help="Take so many of the images, a seeded sample.")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Images to measure on; folders by class give accuracy.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    seed: Seed = 0,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Heal a pruned model so that it follows the dense one; the mask stays as it is."""
    from copy import deepcopy

    from starfish.data import digest_of
    from starfish.heal import check_method, digest, healing_, job_of
    from starfish.masks import digest as digest_of_masks
    from starfish.methods import METHODS, RECIPES
    from starfish.runs import Run
    from starfish.settings import names_of

    if recipe not in RECIPES:
        raise UserError(f"the recipe is `{recipe}`", f"it can be {listed(list(RECIPES))}")
    chosen = _chosen(METHODS, "method", method)
    settings = [f"{key}={value}" for key, value in RECIPES[recipe].items() if key in names_of(chosen)]
    loaded, stages = _load(model, checkpoint, allow_pickle, device, {method: chosen}, [*settings, *(sets or [])])
    student = deepcopy(loaded.model)
    chosen_masks = _start_(student, loaded.model, masks, pruned, allow_pickle)
    pictures, held_out = _healing_images(images, evaluation, limit, stages["preprocess"], loaded, seed)
    job = job_of(student, loaded.model, chosen_masks, pictures, blocks=blocks, seed=seed)
    facts = {
        "model": loaded.name,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "method": method,
        "settings": asdict(stages[method]),
        "preprocess": asdict(stages["preprocess"]),
        "blocks": blocks,
        "seed": seed,
        "images": images,
        "limit": limit,
        "eval": evaluation,
        "digests": {
            "dense": digest(job.dense),
            "start": digest(job.model),
            "masks": digest_of_masks(job.masks),
            "images": digest_of(pictures.pixels),
        },
        "command": _command_line(),
    }
    settled = check_method(stages[method], job)
    run = Run.open(output, {**loaded.config, "starfish": facts}, resume=resume)
    result = run.result
    if result is None:
        _warn(job, held_out)
        result = watch(healing_(job, settled, held_out, run)).facts()
    if json:
        emit(result)
        return
    show_scores(result)
    say(f"healed {loaded.name}: {output}")


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model as in `starfish models`, or a run folder.")
    ],
    evaluation: Annotated[
        str, typer.Option("--eval", help="Images; folders by class, or labels in a tensor file, give accuracy.")
    ],
    dense: Annotated[str | None, typer.Option(help="A model to compare with: agreement, KL and block cosines.")] = None,
    dense_checkpoint: Annotated[Path | None, typer.Option(help="Its weights.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take so many of the images, a seeded sample.")] = None,
    sets: Set = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure a model: top-1 and top-5 with labels; beside another model, how closely it follows that one."""
    from starfish import evaluate as measures
    from starfish.tables import size_rows

    loaded, stages = _load(model, checkpoint, allow_pickle, device, {}, sets)
    pictures = _pictures(evaluation, stages["preprocess"], loaded, role="eval", limit=limit, seed=seed)
    answers = watch(measures.predict(loaded.model, pictures, "evaluate"))
    top1 = measures.accuracy(answers, pictures.labels)
    facts: dict[str, Any] = {
        "model": model,
        "images": len(pictures),
        "accuracy": top1,
        "accuracy_top5": measures.accuracy(answers, pictures.labels, top=5),
        "accuracy_standard_error": measures.standard_error(top1, len(pictures)),
        **measures.size(loaded.model),
        "skipped": pictures.skipped,
    }
    if dense is not None:
        other, _ = _load(dense, dense_checkpoint, allow_pickle, device, {}, None)
        anatomy = _anatomy(other, pictures, blocks)
        dense_answers = watch(measures.predict(other.model, pictures, "dense"))
        facts["dense"] = {"model": dense, "accuracy": measures.accuracy(dense_answers, pictures.labels)}
        found = watch(measures.measure(loaded.model, other.model, dense_answers, pictures, anatomy, "evaluate"))
        facts["fidelity"] = {"agreement": found.agreement, "kl": found.kl, "cosine": measures.mean(found.cosines),
                             "blocks": dict(zip(anatomy.blocks, found.cosines, strict=True))}  # fmt: skip
    if json:
        emit(facts)
    else:
        table(("", model), size_rows(facts))


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(metavar="FILE|MODEL", help="A file with masks or pruned weights, or a model.")],
    model: Annotated[str | None, typer.Option(help="The dense model the file belongs to.")] = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    json: Json = False,
) -> None:
    """Look before anything runs: what a mask file holds, or what was found in a model. Fetches nothing."""
    from starfish.containers import read
    from starfish.models import load
    from starfish.patterns import summarise

    if not Path(what).is_file():
        loaded = load(what, checkpoint=checkpoint, allow_pickle=allow_pickle, pretrained=False)
        show_anatomy(loaded, _anatomy(loaded, None, blocks), json)
        return
    dense, anatomy = None, None
    if model is not None:
        loaded = load(model, checkpoint=checkpoint, allow_pickle=allow_pickle, pretrained=False)
        dense, anatomy = loaded.model, _anatomy(loaded, None, blocks)
    found = read(Path(what), dense, allow_pickle=allow_pickle, dense_weights=checkpoint is not None)
    if found.weights is not None and model is not None and checkpoint is None:
        say("note: nothing is fetched to inspect; to compare with the dense weights, give them with --checkpoint")
    summary = summarise(found.masks, anatomy)
    if json:
        emit({"file": what, "container": found.container, **asdict(summary), "notes": found.notes})
        return
    show_summary(summary, f"{what}: {found.container}")
    for note in found.notes:
        say(f"note: {note}")


@app.command()
def methods(json: Json = False) -> None:
    """List what can heal, with every setting."""
    from starfish.methods import METHODS, summary

    show_stages({name: (method, summary(method)) for name, method in METHODS.items()}, json)


@app.command()
def pruners(json: Json = False) -> None:
    """List what can choose masks, with every setting."""
    from starfish.pruners import PRUNERS, summary

    show_stages({name: (pruner, summary(pruner)) for name, pruner in PRUNERS.items()}, json)


@app.command()
def models(
    search: Annotated[str, typer.Argument(help="Part of a name.")] = "",
    json: Json = False,
) -> None:
    """Say what a MODEL can be, or list the timm and torchvision models whose name contains SEARCH."""
    from starfish.models import KINDS, known

    if not search:
        emit({"kinds": KINDS}) if json else table(("MODEL", ""), list(KINDS.items()))
        return
    names = known(search)
    if not names:
        raise UserError(f"no timm or torchvision model has `{search}` in its name")
    emit({"models": names}) if json else table(("MODEL",), [(name,) for name in names])


@app.command()
def doctor(json: Json = False) -> None:
    """Check that this machine can heal, and say what to install where it cannot."""
    from starfish.doctor import examine

    findings = examine()
    if json:
        emit({"ok": all(finding.ok for finding in findings), "checks": [asdict(finding) for finding in findings]})
    else:
        table(("check", "", "found"), [(f.name, "ok" if f.ok else "BAD", f.found) for f in findings])
        for finding in findings:
            if not finding.ok and finding.hint:
                say(f"hint: {finding.name}: {finding.hint}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(2)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder.")] = Path("starfish-demo"),
    json: Json = False,
) -> None:
    """Prune a small vision transformer hard and heal it, offline, in about a minute."""
    import shutil
    from importlib.resources import files

    from starfish import masks as masks_module
    from starfish.models import load
    from starfish.pruners import prune
    from starfish.pruners.magnitude import Magnitude

    folder = Path(str(files("starfish"))) / "demo"
    run = output / "run"
    if (run / "config.json").is_file():  # of an earlier demo
        shutil.rmtree(run)
    say(f"A vision transformer trained on Fashion-MNIST loses {DEMO_SPARSITY:.0%} of the weights of each layer.")
    loaded = load(f"local-dir:{folder}")
    pictures = _pictures(str(folder / "images.npz"), loaded.preprocess, loaded)
    masks_module.write(output / "masks.safetensors", prune(loaded.model, Magnitude(DEMO_SPARSITY), pictures))
    heal(
        model=loaded.name,
        masks=output / "masks.safetensors",
        images=str(folder / "images.npz"),
        evaluation=str(folder / "images.npz"),
        output=run,
        sets=DEMO_SETTINGS,
        json=json,
    )
    say(DEMO_NEXT.format(run=run))


DEMO_SPARSITY = 0.85
DEMO_SETTINGS = ["epochs=10", "lr=1e-3"]
DEMO_NEXT = """
What you have now: {run} holds the healed model, its masks, every figure (result.json) and a model card (README.md).

Your own model, with a folder of unlabeled images:
  $ starfish inspect timm/deit_tiny_patch16_224
  $ starfish prune timm/deit_tiny_patch16_224 --sparsity 0.6 -o masks.safetensors
  $ starfish heal timm/deit_tiny_patch16_224 --masks masks.safetensors --images my-images/ -o my-run
A checkpoint that some other tool has pruned: --pruned FILE in place of --masks."""


def _suffix(path: Path, suffix: str) -> None:
    if path.suffix != suffix:
        raise UserError(f"the output is `{path}`", f"give a file that ends in {suffix}")


def _chosen(known: dict[str, Any], kind: str, name: str) -> Any:
    if name not in known:
        raise UserError(f"there is no {kind} `{name}`", f"there are {listed(list(known), 20)}")
    return known[name]


def _load(
    model: str, checkpoint: Path | None, allow_pickle: bool, device: str, stages: dict[str, Any], sets: list[str] | None
) -> tuple[Loaded, dict[str, Any]]:
    """The model on its device, and the stages of the command (its preprocessing one of them) with their settings."""
    from starfish.data import Preprocess
    from starfish.devices import choose_device, keep_freed_memory
    from starfish.models import load
    from starfish.settings import settle

    keep_freed_memory()
    settle({**stages, "preprocess": Preprocess()}, sets or [])  # refuse before the costly part
    loaded = load(model, checkpoint=checkpoint, allow_pickle=allow_pickle)
    loaded.model.to(choose_device(device))
    return loaded, settle({**stages, "preprocess": loaded.preprocess}, sets or [])


def _pictures(source: str, preprocess: Preprocess, loaded: Loaded, *, role: Literal["calib", "eval"] = "calib",
              limit: int | None = None, seed: int = 0) -> StoredImages:  # fmt: skip
    from starfish.data import load
    from starfish.models import classes

    pictures = watch(load(source, preprocess, role=role, limit=limit, seed=seed, classes=classes(loaded)))
    for name in pictures.skipped:
        say(f"warning: skipped `{name}`, which cannot be read")
    return pictures


def _anatomy(loaded: Loaded, pictures: StoredImages | None, blocks: str | None) -> Anatomy:
    from starfish.anatomy import find
    from starfish.devices import to_device
    from starfish.models import device_of, example

    inputs = pictures.batch([0, len(pictures) - 1]) if pictures else example(loaded)
    return find(loaded.model, to_device(inputs, device_of(loaded.model)), blocks=blocks)


def _start_(student: nn.Module, dense: nn.Module, masks: Path | None, pruned: Path | None, allow_pickle: bool) -> Masks:
    """The masks; `student` gets the weights to start from."""
    from starfish.containers import read
    from starfish.masks import sparsity

    if (masks is None) == (pruned is None):
        raise UserError("give either --masks or --pruned", "--masks FILE with masks, --pruned FILE with pruned weights")
    path = masks or pruned
    assert path is not None
    found = read(path, dense, allow_pickle=allow_pickle)
    say(f"{path}: {found.container}, {sparsity(found.masks):.1%} of {len(found.masks)} tensors pruned")
    for note in found.notes:
        say(f"note: {note}")
    if pruned is not None:
        if found.weights is None:
            raise UserError(f"`{pruned}` holds masks and no weights", "give it with --masks")
        student.load_state_dict(found.weights)
    return found.masks


MOST_HELD_OUT = 256


def _healing_images(
    images: str, evaluation: str | None, limit: int | None, preprocess: Preprocess, loaded: Loaded, seed: int
) -> tuple[StoredImages, StoredImages]:
    """Images to heal on and others to measure on: those of --eval, else some of the same source held out."""
    if evaluation is not None:
        pictures = _pictures(images, preprocess, loaded, limit=limit, seed=seed)
        return pictures, _pictures(evaluation, preprocess, loaded, role="eval", seed=seed)
    wanted = limit + MOST_HELD_OUT if limit and limit > 0 else limit
    pictures = _pictures(images, preprocess, loaded, limit=wanted, seed=seed)
    spare = 0 if limit is None else len(pictures) - limit
    size = spare if spare > 0 else min(MOST_HELD_OUT, len(pictures) // 10)
    if size < 1:
        raise UserError(
            f"`{images}` has {len(pictures)} images", "give 10 or more, or others to measure on with --eval"
        )
    healing, held_out = pictures.split(len(pictures) - size)
    say(f"no --eval: {size} of the images are held out to measure on, {len(healing)} heal")
    return healing, held_out


def _warn(job: Job, held_out: StoredImages) -> None:
    """What the user should know before the time is spent."""
    if held_out.labels is None:
        say("note: no labels to measure with; the table says how closely the model follows the dense one")


def _command_line() -> list[str]:
    return [word for word in sys.argv[1:] if word not in {"--resume", "--json"}]
