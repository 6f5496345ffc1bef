"""Train and evaluate: the story of a run, in the order in which it happens."""

from __future__ import annotations

import json
import logging
import resource
import time
from pathlib import Path
from typing import Any, Dict, Optional

import tensorflow as tf

from lm import strategies
from lm.account import bits_per_byte, consumed_shares, costs, first_summary, host_usage, position, rates
from lm.checkpoint import Checkpoints, Progress, identity
from lm.data.loader import evaluation_batches, training_batches
from lm.data.mixture import make_mixture
from lm.data.shards import Manifest
from lm.data.streams import TokenStream
from lm.energy import kg_a_kwh, make_meter
from lm.generate import continue_text
from lm.model import Decoder, named_variables
from lm.optimizer import make_optimizer
from lm.plan import Plan
from lm.profiling import SystemSampler, start_sampler
from lm.report import StepDisplay, closing_rows, make_console, open_log, table
from lm.run import RunFailed, RunFolder, write_whole
from lm.schema import Config
from lm.stop import StopRequest
from lm.stopwatch import Stopwatch, shares
from lm.strategies import Strategy, devices
from lm.tracking.run import Tracker

STOP_EVERY_BATCHES = 16  # how often an evaluation asks whether to stop
log = logging.getLogger("lm")


def train(
    config: Config, plan: Plan, run: RunFolder, data: Path, manifest: Manifest, stopwatch: Stopwatch
) -> Dict[str, Any]:
    """Trains, or goes on training, in a run folder. Every rank calls it; rank 0 alone writes.

    data: the folder of the prepared set. stopwatch: started before TensorFlow was imported. Returns the summary, whose
    status is finished or stopped. Raises RunFailed for a run that cannot go on, and ConfigError for a checkpoint of
    another model or dataset.
    """
    stop = StopRequest()

    # --- where this process stands -----------------------------------------------------------------
    with stopwatch("start_up"):
        strategy = strategies.load(config)
        topology = strategy.topology
        chief = topology.rank == 0
        console = make_console()
        open_log(run.log if chief else None, console, chief)
        log.info("parallel=%s: %s", config.parallel.name, strategy.library)
        if chief:
            run.write_config(config)
            write_whole(run.plan, json.dumps(plan.as_dict(), indent=1) + "\n")

        # --- model, optimizer, data ----------------------------------------------------------------
        vocabulary, context, seed = config.dataset.vocabulary_size, config.model.context, config.run.seed
        model = strategy.model(lambda: Decoder(config.model, vocabulary, seed, config.train.precision))
        optimizer = make_optimizer(config, plan, named_variables(model))
        variables = strategy.variables(model, optimizer)
        mixture = make_mixture(config, data, manifest)
        validation = TokenStream.of(data, manifest, "validation")
        peak_flops, peak_from = devices.peak_flops(config, strategy)

    # --- resume ------------------------------------------------------------------------------------
    with stopwatch("checkpoint"):
        checkpoints = Checkpoints(run.checkpoints, identity(config, manifest), config.checkpoint.keep)
        restored = checkpoints.restore(variables)
        progress = restored or Progress()
        mean_step = strategy.mean(progress.step)  # also: nobody lets go of a checkpoint that another still reads
    if mean_step != progress.step:
        raise RunFailed(f"this rank read the checkpoint of step {progress.step}, the ranks' mean is {mean_step}")
    if restored is None and config.run.resume == "must":
        raise RunFailed(f"run.resume=must, and there is no checkpoint in {run.checkpoints}")
    if restored:
        log.info("resumed at step %d, sequence %d", progress.step, progress.sequences)

    # --- the steps ---------------------------------------------------------------------------------
    summary = first_summary(config, plan, manifest, topology.size, peak_flops, peak_from)
    summary["checkpoint_step"] = progress.step if restored else None
    display = StepDisplay(console, plan.steps, progress.step, chief)
    tracker: Optional[Tracker] = None
    sampler: Optional[SystemSampler] = None
    meter = make_meter(config, topology.local_rank)
    stopping = False
    try:
        sampler = start_sampler(
            config.profiling.name, run.profiler, topology.rank, topology.local_rank, topology.local_size
        )
        if chief:
            began = time.time() - stopwatch.split()["total"]
            saved_at = (restored.saved_at or began) if restored else None  # older checkpoints have no time
            stopwatch.go_on_from(progress.seconds, run.begin_attempt(began, saved_at))
            kept = run.forget_metrics_after(progress.step)
            summary["loss"] = next((line["loss"] for line in reversed(kept) if "loss" in line), None)
        if chief and config.tracking.uri is not None:
            tracker = Tracker(config.tracking.uri, run, config)
        train_step = strategy.train_step(model, optimizer, plan)
        eval_step = strategy.eval_step(model)

        def evaluate_now() -> None:
            with stopwatch("evaluation"):
                val_loss = evaluate(eval_step, strategy, plan, validation, config.train.eval_sequences, stop)
            if val_loss is None:  # stopped: the resumed run evaluates instead
                return
            progress.measure(val_loss)
            measured = {"val_loss": val_loss, "val_bits_per_byte": bits_per_byte(val_loss, manifest)}
            consumed = consumed_shares(mixture, progress)
            if chief:
                run.append_metrics({**position(progress, plan), **measured, **consumed})
            display.evaluated(progress.step, measured, summary["gzip_bits_per_byte"])
            if consumed:
                log.info("  consumed so far: %s", ", ".join(f"{name} {share:.1%}" for name, share in consumed.items()))

        earlier_kwh = progress.kwh

        def measure_energy() -> None:
            if meter is not None:
                meter.read()
            progress.kwh = earlier_kwh + strategy.mean(meter.kwh if meter is not None else 0.0) * topology.replicas

        def save() -> None:
            measure_energy()
            progress.seconds, progress.saved_at = stopwatch.split(), time.time()
            del progress.seconds["total"]
            with stopwatch("checkpoint"):
                if chief:
                    checkpoints.save(progress, variables)
                strategy.barrier()
            summary["checkpoint_step"] = progress.step

        beside = [worker.start for worker in (tracker, meter) if worker is not None]
        batches = training_batches(
            mixture, context, progress.sequences, plan.global_batch_sequences, topology.replica, topology.replicas
        )
        if restored and progress.val_loss is None and _evaluation_due(progress, config):
            evaluate_now()
        host_usage()  # what it says next is from here on
        while progress.step < plan.steps:
            with stopwatch("data_wait" if strategy.traces else "start_up"):
                tokens_BS = next(batches)
            with stopwatch("step" if strategy.traces else "compile"):
                # dropout masks follow the run's seed and this replica's first sequence, never the clock
                first = progress.sequences + topology.replica * plan.accumulation * plan.microbatch_sequences
                step = train_step(tokens_BS, tf.constant([seed, first], tf.int64))
                line = {name: value.numpy().item() for name, value in step._asdict().items()}
                stopping = _asked_to_stop(strategy, stop)
            progress.count(line, plan.global_batch_sequences)
            display.step(progress.step)
            last = progress.step == plan.steps or stopping

            if progress.step % config.train.log_every_steps == 0 or last or progress.nonfinite_steps:
                line.update(rates(stopwatch.lap(), plan, peak_flops))
                line.update(position(progress, plan), skipped_steps=progress.skipped_steps)
                if chief:
                    run.append_metrics({**line, **host_usage()})
                display.logged(line)
                summary["loss"] = line["loss"]
            while beside:  # their imports would hold the first step up
                beside.pop()()
            at_the_end = progress.step == plan.steps and progress.nonfinite_steps > 0
            if progress.nonfinite_steps >= config.train.max_nonfinite_steps or at_the_end:
                raise RunFailed(_nonfinite(line, progress, checkpoints))

            if not stopping and _evaluation_due(progress, config):
                evaluate_now()
            due = progress.step % config.checkpoint.every_steps == 0 or last or progress.is_best
            if due and not progress.nonfinite_steps:
                save()
            if stopping:
                break

        # --- closing -------------------------------------------------------------------------------
        summary["status"] = "finished" if progress.step >= plan.steps else "stopped"
        if summary["status"] == "finished" and progress.val_loss is None:  # a stop came with the last step
            evaluate_now()
        measure_energy()
        summary["stage_peak_memory_bytes"] = strategy.stage_peak_bytes()
        whole = strategy.logits(model)
        if chief and summary["status"] == "finished" and config.train.sample_tokens and whole is not None:
            with stopwatch("sample"):
                write_whole(run.sample, continue_text(whole, config, data, manifest))
    except Exception as error:
        summary.update(status="failed", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        display.close()
        if sampler is not None:
            sampler.stop()
        if meter is not None:
            meter.stop()
        split = stopwatch.split()
        tokens = progress.sequences * plan.context_tokens
        spent = costs(config, tokens, split["total"], progress.kwh, kg_a_kwh(config, meter))
        summary.update(
            {key: value for key, value in position(progress, plan).items() if key != "time"},
            **rates(stopwatch.totals(), plan, peak_flops),
            skipped_steps=progress.skipped_steps,
            val_loss=progress.val_loss,
            val_bits_per_byte=bits_per_byte(progress.val_loss, manifest) if progress.val_loss is not None else None,
            best_val_loss=progress.best_val_loss,
            eval_sequences=config.train.eval_sequences,
            sequences_by_source=mixture.realised(progress.sequences),
            traces=strategy.traces,
            signal=stop.number,
            goodput=split.get("step", 0.0) / split["total"],
            goodput_seconds=split,
            **spent,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        try:
            if chief:
                run.write_summary(summary)
                run.append_metrics({**position(progress, plan), **shares(split), **spent})
        finally:
            if tracker is not None:
                tracker.close(summary["status"])
    if chief:
        if run.sample.exists() and summary["status"] == "finished":
            log.info("sample:\n%s", run.sample.read_text())
        console.print(table("", closing_rows(summary, run.path)))
    return summary


def evaluate(
    eval_step: strategies.EvalStep,
    strategy: Strategy,
    plan: Plan,
    validation: TokenStream,
    at_most: Optional[int],
    stop: StopRequest,
) -> Optional[float]:
    """Token-weighted mean loss in nats over the validation split, or at most so many sequences of it.

    None where the ranks were asked to stop.
    """
    topology = strategy.topology
    nats, tokens = 0.0, 0.0
    batches = evaluation_batches(
        validation, plan.context_tokens, plan.evaluation_sequences, topology.replica, topology.replicas, at_most
    )
    for number, (tokens_BS, weights_BT) in enumerate(batches):
        batch_nats, batch_tokens = eval_step(tokens_BS, weights_BT)
        nats, tokens = nats + float(batch_nats), tokens + float(batch_tokens)
        if number % STOP_EVERY_BATCHES == 0 and _asked_to_stop(strategy, stop):
            return None
    return nats / tokens


def _asked_to_stop(strategy: Strategy, stop: StopRequest) -> bool:
    """Whether any rank was; every rank asks, so that all stop at the same step."""
    return strategy.mean(float(stop.number > 0)) > 0


def _evaluation_due(progress: Progress, config: Config) -> bool:
    return progress.step % config.train.eval_every_steps == 0 or progress.step == config.train.steps


def _nonfinite(line: Dict[str, Any], progress: Progress, checkpoints: Checkpoints) -> str:
    kept = checkpoints.steps()
    saved = f"the last checkpoint is of step {kept[0]}" if kept else "no checkpoint was written before"
    return (
        f"step {progress.step}: loss {line['loss']}, gradient norm {line['grad_norm']}: not finite for "
        f"{progress.nonfinite_steps} steps in a row (train.max_nonfinite_steps); {saved}. "
        "Try a lower optimizer.learning_rate"
    )
