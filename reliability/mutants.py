"""The mutants of R35: faults that a change could bring in, by what they would cost a user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault and the tests that must find it.

    Args:
        name: what the mutant does to a user.
        file: below fivetune/.
        old, new: a text that is in the file once, and what replaces it.
        tests: files of tests; () for a mutant of a row alone.
        only: which of their tests to run, as pytest's -k; "" for all.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    only: str = ""


STEP = "training/step/plain.py"
ACCUMULATE = "training/step/accumulate.py"
FINITE = "training/step/nonfinite.py"
LOSS = "model/loss.py"
CHECKPOINT = "training/state/checkpoint.py"
OBJECTIVE_TESTS = ("tests/model/test_objective.py",)
TRAINING_TESTS = ("tests/training/test_training.py",)
CHECKPOINT_TESTS = ("tests/training/state/test_checkpoint.py",)
RESUME_TESTS = ("tests/training/state/test_resume_faults.py",)
RUNDIR_TESTS = ("tests/rundir/test_rundir.py",)
STEP_TESTS = ("tests/training/step/test_step.py",)
DURABLE_TESTS = ("tests/rundir/test_durability.py",)

LEARNING = [
    Mutant("the loss is not that of the label", LOSS,
           "nat = norm - logits.gather(1, targets[:, None])[:, 0]",
           "nat = norm - logits.amax(-1)", OBJECTIVE_TESTS),
    Mutant("the normaliser of the loss is summed in 16 bits", LOSS,
           "norm = logits.float().logsumexp(-1)", "norm = logits.logsumexp(-1).float()", STEP_TESTS, "16_bit"),
    Mutant("a mean of means", STEP,
           "return weight * losses.sum() / self.inputs.num_scored_tokens", "return weight * losses.mean()",
           ("tests/training/test_losses.py",), "any_split"),
    Mutant("a filler batch is learnt", STEP,
           "weight = 0 if batch.is_filler else 1", "weight = 1", STEP_TESTS, "filler"),
    Mutant("the head's part of a tied gradient is lost", LOSS,
           "total = ctx.tied_gradient.grad if place is None else place", "total = place", OBJECTIVE_TESTS),
    Mutant("the head learns from the last chunk of tokens alone", LOSS,
           "                if of_head is None:\n", "                if True:\n", OBJECTIVE_TESTS),
    Mutant("padding is scored", "data/store/batch.py",
           "_pad_rows(batch.labels, batch.cu_seqlens_tgt, IGNORE_INDEX, sizes)",
           "_pad_rows(batch.labels, batch.cu_seqlens_tgt, 0, sizes)", ("tests/data/store/test_batch.py",)),
    Mutant("gradients stay for the next step", STEP,
           "    scaler.update()\n    engine.clear_gradients(learner)\n", "    scaler.update()\n",
           RESUME_TESTS, "unchanged_run"),
    Mutant("only the last micro-batch's loss is reported", "training/strategies/__init__.py",
           "            total = loss.detach() if total is None else total + loss.detach()\n        assert",
           "            total = loss.detach()\n        assert",
           ("tests/training/test_losses.py",), "any_split"),
    Mutant("a step that is repeated after memory ran out draws other dropout masks", ACCUMULATE,
           "        engine.clear_gradients(learner)\n        set_random_states(before)\n",
           "        engine.clear_gradients(learner)\n", STEP_TESTS, "runs_out_later"),
    Mutant("a step that is repeated after memory ran out keeps half a gradient", ACCUMULATE,
           "            engine.clear_gradients(learner)  # makes room for sending zeros\n"
           "\n        # A rank that failed takes part too: the others wait for it, and learn that it failed.\n"
           "        sums, too_many, signum = _sum_over_ranks(learner, inputs, sums, too_many)\n"
           "        if not too_many:\n"
           "            return StepSums(sums[0], sums[1], batch_size, signum)\n"
           "        if too_many == 1:\n"
           '            raise failed or MemoryError("another rank ran out of memory with one example.")\n'
           "\n        # Half of the size that failed, rounded up.\n"
           "        batch_size = -(-too_many // 2)\n"
           "        engine.clear_gradients(learner)\n",
           "\n        # A rank that failed takes part too: the others wait for it, and learn that it failed.\n"
           "        sums, too_many, signum = _sum_over_ranks(learner, inputs, sums, too_many)\n"
           "        if not too_many:\n"
           "            return StepSums(sums[0], sums[1], batch_size, signum)\n"
           "        if too_many == 1:\n"
           '            raise failed or MemoryError("another rank ran out of memory with one example.")\n'
           "\n        # Half of the size that failed, rounded up.\n"
           "        batch_size = -(-too_many // 2)\n", STEP_TESTS, "runs_out_later"),
    Mutant("targets of a split batch are those of other examples", "data/store/batch.py",
           "batch.cu_seqlens_tgt[middle:] - labels", "batch.cu_seqlens_tgt[middle:] - inputs",
           ("tests/training/autotune/test_micro_batch.py",), "repeated_with_half"),
    Mutant("gradients are not clipped", "training/strategies/__init__.py",
           "torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)", "pass", TRAINING_TESTS, "clipped"),
    Mutant("factored gradients are not clipped", "training/strategies/__init__.py",
           "scale_tables(parameters, max_norm, norm)", "pass", ("tests/training/optimizers/test_table_adamw.py",)),
    Mutant("small gradients are scaled up to the norm", "distributed/sharding.py",
           "scale = (max_norm / (norm + 1e-6)).clamp_max(1)", "scale = max_norm / (norm + 1e-6)",
           STEP_TESTS, "small_sharded"),
    Mutant("a later chunk of tokens learns from the teacher's first ones", LOSS,
           "start=i * ctx.rows", "start=0", ("tests/training/test_distill.py",), "of_the_divergence"),
    Mutant("early stopping waits one evaluation too long", "training/stopping.py",
           "state.num_evals_without_improvement >= rule.patience",
           "state.num_evals_without_improvement > rule.patience",
           ("tests/training/test_losses.py",), "stops or same_step"),
    Mutant("the worse of two evaluations is exported", "rundir/figures.py",
           "return later.score > earlier.score if higher_is_better else later.score < earlier.score",
           "return later.score < earlier.score if higher_is_better else later.score > earlier.score",
           ("tests/rundir/test_figures.py",)),
]  # fmt: skip

NOT_FINITE = [
    Mutant("an infinite gradient is applied", FINITE,
           "        if math.isfinite(norm):\n            return\n", "        return\n",
           TRAINING_TESTS, "not_finite"),
    Mutant("a NaN loss is applied", FINITE,
           "    if math.isfinite(loss):\n        if math.isfinite(norm):",
           "    if True:\n        if not math.isinf(norm):",
           TRAINING_TESTS, "not_finite"),
    Mutant("a step is checked after it is applied", STEP,
           "    values = check_values(learner, inputs,",
           "    scaler.step(optimizer)\n    values = check_values(learner, inputs,",
           TRAINING_TESTS, "not_finite"),
    Mutant("the device applies what is not finite", STEP,
           "        optimizer.found_inf = inputs.nonfinite_flag  # type: ignore[attr-defined]\n", "        pass\n",
           ("tests/machine/telemetry/test_meter.py",), "no_weight_moves"),
    Mutant("after a step that is not finite the device goes on", FINITE,
           "flag.logical_or_(~values.isfinite().all())", "flag.copy_(~values.isfinite().all())",
           ("tests/machine/telemetry/test_meter.py",), "no_weight_moves"),
    Mutant("a run in which a step is not finite goes on", "training/step_records.py",
           "        refuse_nonfinite(learner, pending.batches, pending.step, loss, grad_norm)\n", "        pass\n",
           ("tests/machine/telemetry/test_meter.py",), "no_weight_moves"),
    Mutant("a run in fp16 skips every step", FINITE,
           "learner.scaler.get_scale() > MIN_LOSS_SCALE", "learner.scaler.get_scale() >= 0",
           STEP_TESTS, "every_loss_scale"),
    Mutant("NaN is written into a JSON file", "rundir/lines.py",
           "ensure_ascii=False, allow_nan=False", "ensure_ascii=False",
           ("tests/rundir/test_lines.py",), "json_does_not_have"),
]  # fmt: skip

RESUMING = [
    Mutant("a resumed run draws other dropout masks", "training/state/snapshot.py",
           '    torch.set_rng_state(states["torch"])\n', "", CHECKPOINT_TESTS, "everything_comes_back"),
    Mutant("a resumed run draws other numbers of numpy", "training/state/snapshot.py",
           "    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))\n", "",
           CHECKPOINT_TESTS, "everything_comes_back"),
    Mutant("a resumed run has lost its moments", CHECKPOINT,
           'load_optimizer(model, optimizer, state["optimizer"], shards, world)',
           'load_optimizer(model, optimizer, {**state["optimizer"], "state": {}}, shards, world)',
           CHECKPOINT_TESTS, "everything_comes_back"),
    Mutant("a resumed run has another loss scale", CHECKPOINT,
           '        scaler.load_state_dict(state["scaler"])\n', "", CHECKPOINT_TESTS, "loss_scale"),
    Mutant("a resumed run begins with the first examples again", "data/store/stream.py",
           "ahead = worker.submit(self.build_micro_batches, first_step)",
           "ahead = worker.submit(self.build_micro_batches, 0)", ("tests/data/store/test_stream.py",)),
    Mutant("every epoch has the same order", "data/store/stream.py",
           "    random = np.random.default_rng([plan.seed, epoch])\n    if order",
           "    random = np.random.default_rng([plan.seed, 0])\n    if order", ("tests/data/store/test_stream.py",)),
    Mutant("another run's checkpoint is used", "training/state/resume.py",
           "if found.run_id and found.run_id != owner.run_id:", "if False:", RESUME_TESTS, "of_another_run"),
    Mutant("a run is resumed on other data", "training/state/resume.py",
           "if found.data and found.data != owner.data:", "if False:", RESUME_TESTS, "other_content"),
    Mutant("a run is resumed with edited settings", "training/state/resume.py",
           "_compare_settings(found.settings, owner.settings, found.settings)",
           "_compare_settings(found.settings, owner.settings, ())", RESUME_TESTS, "edited_settings"),
    Mutant("steps after the checkpoint are recorded twice", "rundir/writer.py",
           'kept = [record for record in records if record["step"] <= step]', "kept = records",
           RUNDIR_TESTS, "after_the_checkpoint"),
    Mutant("a resumed run begins at step 0", "training/state/restore.py",
           "    if world.is_first:\n        found =", "    if False:\n        found =", RESUME_TESTS, "unchanged_run"),
    Mutant("what a killed save has left to do is forgotten", "training/loop.py",
           "training.saving = replace(state) if saved else None", "training.saving = None", RESUME_TESTS, "tidied_up"),
    Mutant("the oldest checkpoint is resumed", CHECKPOINT,
           "for step in reversed(steps):", "for step in steps:", CHECKPOINT_TESTS, "set_aside or by_number"),
    Mutant("step 7 comes after step 14", CHECKPOINT,
           'return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,18}", name, re.ASCII))',
           'return [int(name) for name in sorted(names) if re.fullmatch(r"[0-9]{1,18}", name, re.ASCII)]',
           CHECKPOINT_TESTS, "by_number"),
    Mutant("a resumed run forgets the evaluations without improvement", CHECKPOINT,
           "return position, owner", "return replace(position, num_evals_without_improvement=0), owner",
           ("tests/training/test_losses.py",), "stops_at_the_same_step"),
    Mutant("a stopped run saves nothing", "training/loop.py",
           "(is_checkpoint_due(training) or stopping)", "is_checkpoint_due(training)",
           ("tests/training/state/test_resume.py",), "stopped_by_a_signal"),
    Mutant("the score of a damaged checkpoint is exported with other weights", "training/export.py",
           "            if reason := _find_damage(training, path):\n", "            if reason := None:\n",
           RESUME_TESTS, "best_checkpoint_are_not"),
]  # fmt: skip

FILES = [
    Mutant("a flipped bit is not seen", "rundir/checksums.py",
           'path.stat().st_size == listed["size"] and compute_crc32(path) == listed["crc32"]',
           'path.stat().st_size == listed["size"]', ("tests/rundir/test_checksums.py",)),
    Mutant("the checksum is that of the last block", "rundir/checksums.py",
           "value = zlib.crc32(block, value)", "value = zlib.crc32(block)", DURABLE_TESTS, "large"),
    Mutant("a missing file is not seen", "rundir/checksums.py",
           '                return f"{name} is missing"\n', "                continue\n",
           ("tests/rundir/test_checksums.py",)),
    Mutant("a file is renamed before it is on the disk", "rundir/files.py",
           "            file.flush()\n            os.fsync(file.fileno())\n", "", DURABLE_TESTS, "order"),
    Mutant("a file is written in place", "rundir/files.py",
           '    staging = (staging_folder or path.parent) / f".{path.name}.{uuid4().hex[:8]}.{os.getpid()}.tmp"\n',
           "    staging = path\n", RUNDIR_TESTS, "whole_or_not"),
    Mutant("the weights of a checkpoint are not on the disk", "rundir/checksums.py",
           "        os.fsync(file.fileno())\n", "        pass\n", DURABLE_TESTS, "order"),
    Mutant("the renaming of a checkpoint is not on the disk", "model/save.py",
           "    fsync_folder(folder.parent)\n", "", DURABLE_TESTS, "order"),
    Mutant("a folder is removed before the one that replaces it is there", "model/save.py",
           "        folder.rename(old)\n", "        shutil.rmtree(folder)\n", DURABLE_TESTS, "replaced"),
    Mutant("a checkpoint has its name before its checksums", CHECKPOINT,
           "    write_checksums(staging, known=checksums)\n    apply_umask(staging)\n"
           "    replace_folder(staging, target)\n",
           "    apply_umask(staging)\n    replace_folder(staging, target)\n"
           "    write_checksums(target, known=checksums)\n", DURABLE_TESTS, "order"),
    Mutant("the best checkpoint is removed", CHECKPOINT,
           "list_steps(folder)[:-keep] if step not in held]", "list_steps(folder)[:-keep]]",
           CHECKPOINT_TESTS, "rotation"),
    Mutant("one checkpoint too few is kept", CHECKPOINT,
           "list_steps(folder)[:-keep] if", "list_steps(folder)[: 1 - keep or None] if", CHECKPOINT_TESTS, "rotation"),
    Mutant("a checkpoint may run code", CHECKPOINT,
           'torch.load(path / "state.pt", weights_only=True', 'torch.load(path / "state.pt", weights_only=False',
           CHECKPOINT_TESTS, "foreign"),
    Mutant("two runs write one folder", "rundir/files.py",
           "fcntl.LOCK_SH if shared else fcntl.LOCK_EX", "fcntl.LOCK_SH", RUNDIR_TESTS, "two_runs"),
    Mutant("who has the folder of a run is not said", "rundir/writer.py",
           '        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())\n', "",
           RUNDIR_TESTS, "two_runs"),
    Mutant("who asks whether a lock is free keeps a run from starting", "rundir/writer.py",
           "LOCK_TRIES = 20", "LOCK_TRIES = 1", RUNDIR_TESTS, "moment_later"),
    Mutant("a run goes on in a folder that was moved", "rundir/writer.py",
           "        if not self._is_in_place():\n            raise RunDirError(\n",
           "        if False:\n            raise RunDirError(\n", RUNDIR_TESTS, "renamed"),
]  # fmt: skip

SHOWN = [
    Mutant("tokens are shown", "redaction.py",
           "return _URL_CREDENTIALS.sub(HIDDEN, _TOKENS.sub(HIDDEN, text))",
           "return _URL_CREDENTIALS.sub(HIDDEN, text)", ("tests/test_redaction.py",)),
    Mutant("secrets of an error are shown", "errors.py",
           "return name_invisible(redact_secrets(super().__str__()))", "return name_invisible(super().__str__())",
           ("tests/test_redaction.py",), "errors"),
    Mutant("secrets are written into the run's files", "rundir/writer.py",
           "write_json(self.path / name, redact_json(content))", "write_json(self.path / name, content)",
           ("tests/test_redaction.py",), "no_file"),
    Mutant("text from data is HTML", "reading/report/page/render.py",
           'autoescape=lambda name: name is not None and name.endswith(".html")', "autoescape=False",
           ("tests/reading/report/test_report.py",), "text_from_data"),
    Mutant("a web page of another server may ask", "delivery/serving/guard.py",
           "if not self._is_own_host(host):", "if False:", ("fivetune/delivery/serving/guard.py",)),
    Mutant("a numeric failure ends like another error", "errors.py",
           "    exit_code = 5\n", "    exit_code = 1\n", ("tests/test_cli.py",), "every_error"),
    Mutant("a signal's exit code is that of success or of another error", "errors.py",
           "self.exit_code = 128 + signum", "self.exit_code = signum",
           ("tests/training/test_signals.py",), "during_the_report"),
    Mutant("a signal acts in the middle of a step", "training/signals.py",
           "        if not self.is_deferring:\n", "        if first:\n",
           ("tests/training/state/test_resume.py",), "stopped_by_a_signal"),
    Mutant("a second Ctrl-C is not heard", "training/signals.py",
           "signal.signal(signal.SIGINT, signal.default_int_handler)", "pass", ("tests/training/test_signals.py",)),
]  # fmt: skip

ANSWERS = [
    Mutant("answers go on after their end", "model/decode/running.py",
           "if not (token == self._eos or hit_cap or", "if not (hit_cap or",
           ("tests/model/decode/test_decode_beam.py",), "greedy_writes"),
    Mutant("a new answer is drawn by the numbers of the one before it", "model/decode/greedy.py",
           "self._uniforms[slots] = ", "_ = ", ("tests/model/decode/test_sampling.py",), "batch_or_the_order"),
    Mutant("top-p leaves out the token that reaches it", "model/decode/sampling.py",
           "found.cumsum(-1) - found < ", "found.cumsum(-1) < ", ("tests/model/decode/test_sampling.py",),
           "tokens_have"),
    Mutant("suppressed tokens are written", "model/decode/logits.py",
           "if self._suppressed.numel():", "if False:", ("tests/model/decode/test_decode.py",), "suppressed"),
    Mutant("an answer's probability begins with that of the answer before", "model/decode/running.py",
           "        self._logprobs[slot] = 0.0\n", "", ("tests/model/decode/test_decode.py",), "slots_are_filled"),
    Mutant("tokens on their way count for the next answer of a slot", "model/decode/captured.py",
           " if self._first[slot] <= self._num_read]", "]", ("tests/model/decode/test_captured.py",),
           "answers_of_launched"),
    Mutant("an answer sees the keys of the answer before", "model/decode/captured.py",
           "        self._ages.index_fill_(0, places, 0)\n", "", ("tests/model/decode/test_captured.py",),
           "answers_of_launched"),
    Mutant("long answers of a beam are not compared by their length", "model/decode/beam.py",
           "scores = sums / length**decoding.length_penalty", "scores = sums + 0.0",
           ("tests/model/decode/test_decode_beam.py",)),
    Mutant("a label's tokens do not see those before", "model/decode/labels.py",
           "                visible[node] |= visible[parent]\n", "                pass\n",
           ("tests/model/decode/test_decode_labels.py",)),
    Mutant("the worst gold answer counts", "scores/metrics/squad_v2.py",
           '"exact": max(int(predicted == gold)', '"exact": min(int(predicted == gold)',
           ("tests/scores/metrics/test_metrics.py",)),
    Mutant("a word that occurs twice in one text counts twice", "scores/metrics/__init__.py",
           "num_common = sum((Counter(prediction) & Counter(reference)).values())",
           "num_common = sum(word in reference for word in prediction)", ("tests/scores/metrics/test_metrics.py",)),
    Mutant("a threshold separates equal scores", "scores/metrics/squad_v2.py",
           "if is_last_of_tie and current > best:", "if current > best:", ("tests/scores/metrics/test_metrics.py",)),
    Mutant("skipped records are not counted", "data/examples.py",
           "        self.num_read += 1\n        self.num_skipped += 1\n", "        self.num_read += 1\n",
           ("tests/data/store/test_store.py",)),
    Mutant("an answer that was cut away is not counted", "data/store/encode.py",
           "answer_clipped=extractive and high > low and _is_answer_lost(", "answer_clipped=False and _is_answer_lost(",
           ("tests/data/store/test_encode.py",), "lost_to_truncation"),
]  # fmt: skip

MUTANTS = [*LEARNING, *NOT_FINITE, *RESUMING, *FILES, *SHOWN, *ANSWERS]
