"""The training loop: a block of every stream, an update, records, evaluations, checkpoints.

A signal on any rank ends it, after the step or within the evaluation under way, with a checkpoint. An evaluation that
was not made then is made when the run goes on, so that it goes on as if nothing had happened.
"""

import math
import signal
import time
from dataclasses import replace

import torch

from megatron_allattn.data.indexed import Tokens
from megatron_allattn.data.prefetch import Prefetcher
from megatron_allattn.data.streams import Block, num_evaluation_blocks
from megatron_allattn.engine.finite import NotFinite
from megatron_allattn.engine.interface import StepResult
from megatron_allattn.parallel.collectives import broadcast_object
from megatron_allattn.training.evaluation import evaluate
from megatron_allattn.training.metrics import per_unit
from megatron_allattn.training.observations import HeadUse, observe_evaluation
from megatron_allattn.training.report import Console, header
from megatron_allattn.training.schedules import learning_rate
from megatron_allattn.training.session import Session


def train(session: Session) -> None:
    """Run from the session's step to the last one, then evaluate; or until it is asked to stop. Collective."""
    console, valid = Console(session), None
    try:
        for line in header(session):
            console.say(line)
        with _prefetcher(session) as batches:
            while not (session.agree_to_stop() or _is_over(session)):
                if session.judged == session.step:
                    with session.watch.section("in the step", session.run.parallel.step_timeout_minutes):
                        _step(session, console, batches)
                    _tell_saved(session, console)
                valid = _validate(session, console)  # before the save: a checkpoint knows the evaluations before it
                if _is_over(session) or _due(session.step, session.run.checkpoint.save_interval):
                    _save(session, console)
        _save(session, console)  # where a signal has ended it, or nothing was left to train and --save is another run
        if not session.stopping:
            _finish(session, console, valid)
        _tell_end(session, console)
    except BaseException as error:
        if isinstance(error, NotFinite) or session.engine.groups.world.size == 1:  # a save under way can end
            _tell_saved(session, console, wait=True)
        raise
    finally:
        console.close()


def _is_over(session: Session) -> bool:
    """Whether the last step and the evaluation after it are done."""
    return session.step >= session.last_step and session.judged == session.step


def _save(session: Session, console: Console) -> None:
    """Save the last step, if there is a run folder, unless that is done."""
    if session.saver is None or session.saved == session.step:
        return
    _tell_saved(session, console, wait=True)
    session.save()
    _tell_saved(session, console)
    if (balanced := session.balance_heads()) is not None:
        console.say(f"heads balanced at step {session.step}: {balanced}")


def _tell_end(session: Session, console: Console) -> None:
    """What is left of a run, once it is on the disk."""
    _tell_saved(session, console, wait=True)
    run_folder = session.run.checkpoint.save
    if session.stopping:
        name = signal.Signals(session.stopping).name
        kept = "nothing is kept without --save" if run_folder is None else f"go on from it with --load {run_folder}"
        console.say(f"stopped at step {session.step} by {name}; {kept}")
    elif run_folder is not None:
        console.say(f"run folder: {run_folder}")
        console.say(
            f"next: tools/generate.py, evaluate.py or convert_checkpoint.py --to huggingface, --load {run_folder}"
        )


def _tell_saved(session: Session, console: Console, *, wait: bool = False) -> None:
    """Say that a save has ended well, if one has; wait: for it, and raise what has gone wrong with it (which all ranks
    else do where they agree whether to stop)."""
    if session.saver is None:
        return
    if wait:
        session.saver.wait()
    if (step := session.saver.finished()) is not None:
        console.say(f"saved step {step} in {session.run.checkpoint.save}")


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _prefetcher(session: Session) -> Prefetcher:
    """Reads this rank's blocks ahead, for a GPU into page-locked memory, from which a copy need not wait."""
    engine = session.engine
    return Prefetcher(session.streams, engine.streams, _page_locked if engine.device.type == "cuda" else None)


def _page_locked(block: Block) -> Block:
    inputs, targets = (torch.from_numpy(ids).pin_memory().numpy() for ids in (block.inputs, block.targets))
    return replace(block, inputs=inputs, targets=targets)


def _step(session: Session, console: Console, batches: Prefetcher) -> None:
    began = time.monotonic()
    run, engine = session.run, session.engine
    block = batches.next_block()
    if block.restarted:
        engine.clear_caches()
    step = session.step + 1
    spans = engine.spans()
    lr = learning_rate(run.optimizer, run.training.train_iters, step, session.plateau.dropped_at)
    result = engine.train_step(block.inputs, block.targets, step, lr, spans)
    tokens = run.training.global_batch_size * run.training.seq_length
    session.step, session.tokens = step, session.tokens + tokens
    record = {
        "kind": "train",
        "step": step,
        "loss": result.loss,
        **per_unit(result.loss, session.dataset.tokenizer.unit),
        "lr": lr,
        "grad_norm": None if result.overflow else result.grad_norm,
        "skipped": engine.skipped,
        "tokens": session.tokens,
        "tokens_per_second": tokens / (time.monotonic() - began),
        "span_mean": spans.tokens.mean().item(),
        "span_max": spans.tokens.max().item(),
    }
    if (scale := engine.loss_scale) is not None:
        record["loss_scale"] = result.loss_scale
    session.metrics.write(record)
    console.step(record)
    if scale is not None and result.overflow:
        console.say(
            f"step {step}: the gradient overflows float16 at loss scale {result.loss_scale:,.0f}, no update is made "
            f"({engine.skipped} so far); the next step has loss scale {scale.scale:,.0f}"
        )
    _guard(session, console, result, block.position)


def _guard(session: Session, console: Console, result: StepResult, position: int) -> None:
    """Tell of a step that was left out, or whose loss jumps, and of the tokens that it read."""
    streams = session.streams
    where = {"position": position, "stream_length": streams.stream_length}
    tokens = (
        f"tokens {position:,} to {position + streams.seq_length:,} of each of the {streams.num_streams} streams of "
        f"{streams.stream_length:,}"
    )
    if result.not_finite is not None:
        session.metrics.write({"kind": "skip", "step": session.step, "reason": result.not_finite, **where})
        console.say(
            f"step {session.step}: {result.not_finite}. No update is made ({session.engine.skipped} so far); {tokens}"
        )
    elif (typical := session.guard.jump(result.loss)) is not None:
        record = {"kind": "spike", "step": session.step, "loss": result.loss, "median": typical}
        session.metrics.write(record | where)
        console.say(
            f"step {session.step}: the loss {result.loss:.4f} is {result.loss / typical:.1f} times the median of the "
            f"last {len(session.guard.losses) - 1}, {typical:.4f}; {tokens}"
        )
    session.guard.count(session.step, result.not_finite)


def _validate(session: Session, console: Console) -> float | None:
    """The evaluation on the validation split that is due after this step, if any, and what follows for the rate.

    None of it where the run is asked to stop meanwhile.
    """
    run, loss = session.run, None
    if _due(session.step, run.training.eval_interval):
        loss = _evaluate(session, console, "valid", session.dataset.valid)
        if session.stopping:
            return None
    session.judged = session.step
    before, session.plateau = session.plateau, session.plateau.after(run.optimizer, session.step, loss)
    if session.plateau.dropped_at is not None and before.dropped_at is None:
        lr = learning_rate(run.optimizer, run.training.train_iters, session.step + 1, session.step)
        why = session.plateau.why_dropped(run.optimizer)
        record = {"kind": "plateau", "step": session.step, "lr": lr, "best": session.plateau.best}
        session.metrics.write(record | {"last_step": session.last_step, "reason": why})
        rest = f"learning rate {lr:.2e} from the next step on, the last step is {session.last_step}"
        console.say(f"plateau at step {session.step}: {why}; {rest}")
    return loss


def _evaluate(session: Session, console: Console, kind: str, tokens: Tokens) -> float | None:
    """Evaluate a split and return its loss; None where it has no block of every stream (the header says so), and where
    the run is asked to stop meanwhile."""
    training = session.run.training
    if not num_evaluation_blocks(len(tokens), training.global_batch_size, training.seq_length):
        return None
    # One rank's number for all: they must never disagree about what follows from it.
    with session.watch.section("in the evaluation", session.run.parallel.evaluation_timeout_minutes):
        use, spans = HeadUse() if kind == "valid" else None, session.engine.spans()
        found = evaluate(session.engine, tokens, spans, training.eval_iters, session.agree_to_stop, use)
        result = broadcast_object(found, session.engine.groups.world)
        if result is None:
            return None
        if use is not None:
            for record in observe_evaluation(session.engine, spans, use, session.step):
                session.observations.write(record)
    unit = per_unit(result.loss, session.dataset.tokenizer.unit)
    session.metrics.write({"kind": kind, "step": session.step, "loss": result.loss, **unit, "tokens": result.tokens})
    console.say(f"{kind} at step {session.step}: loss {result.loss:.4f} | {session.describe_loss(result.loss)}")
    return result.loss


def _finish(session: Session, console: Console, valid: float | None) -> None:
    """The last evaluation, on both splits, beside the entropy of single tokens.

    valid: the loss on the validation split, where it was evaluated after the last step already.
    """
    if session.run.optimizer.lr_decay_style == "plateau":
        console.say(session.why_ended)
    entropy, unit = session.dataset.unigram_entropy, session.dataset.tokenizer.unit
    for kind, tokens, known in (("valid", session.dataset.valid, valid), ("test", session.dataset.test, None)):
        loss = _evaluate(session, console, kind, tokens) if known is None else known
        if session.stopping:
            return
        if loss is not None and not math.isfinite(loss):
            console.say(f"{kind}: the loss is not finite")
        elif loss is not None and entropy > 0:
            bits = loss / math.log(2)
            gap = f"{100 * abs(1 - bits / entropy):.1f} % {'below' if bits <= entropy else 'above'}"
            console.say(f"{kind}: {bits:.4f} bits per {unit}, {gap} the corpus's unigram entropy of {entropy:.4f}")
    if torch.cuda.is_available():
        console.say(f"peak GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
