"""The train_gpt program under its launcher: bad input, and a run that stops, goes on with other ranks and is read back.
usage: train_gpt_test.py FSDP TRAIN_GPT TEXT_FOLDER"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

FSDP, TRAIN_GPT, TEXT = sys.argv[1:4]
SHAPE = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--data", TEXT]
TRAINING = [*SHAPE, "--batch", "6", "--steps", "8", "--log-every", "4"]


def run(ranks, *arguments):
    return subprocess.run([FSDP, "run", "-n", str(ranks), "--", TRAIN_GPT, *map(str, arguments)], capture_output=True, text=True, timeout=60)


class InFolder(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.folder = pathlib.Path(self.scratch.name)

    def train(self, ranks, *arguments):
        summary = self.folder / "summary.json"
        result = run(ranks, *arguments, "--summary", summary)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(summary.read_text()), result.stdout


class BadInput(InFolder):
    def refused(self, code, named, *arguments):
        """Each of 2 ranks says one line that names the thing, and the job ends with `code`."""
        result = run(2, *arguments)
        self.assertEqual(result.returncode, code, result.stderr)
        for rank in range(2):
            lines = [line for line in result.stderr.splitlines() if line.startswith(f"[r{rank}] ")]
            self.assertEqual(len(lines), 1, result.stderr)
            self.assertTrue(lines[0].startswith(f"[r{rank}] train_gpt: "), lines[0])
            self.assertIn(named, lines[0])

    def test_names_unknown_flag(self):
        self.refused(2, "--stepz", "--stepz", 3)

    def test_names_missing_data(self):
        self.refused(1, str(self.folder / "nowhere"), "--data", self.folder / "nowhere")

    def test_names_context_longer_than_the_text(self):
        (self.folder / "short.txt").write_text("short")
        self.refused(1, "--context 128", "--data", self.folder / "short.txt")

    def test_names_batch_that_the_ranks_do_not_divide(self):
        self.refused(2, "--batch 5", *SHAPE, "--batch", 5)

    def test_leaves_the_checkpoints_of_another_model_alone(self):
        out = self.folder / "out"
        self.train(2, *TRAINING, "--out", out)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        self.refused(1, "another model", *TRAINING, "--layers", 3, "--out", out, "--resume")
        self.refused(2, str(out), *TRAINING, "--out", out)
        self.assertEqual(before, {path: path.read_bytes() for path in out.rglob("*") if path.is_file()})


class Training(InFolder):
    def test_goes_on_with_other_ranks_and_is_read_back_on_one(self):
        out, file = self.folder / "out", self.folder / "model.safetensors"
        first, _ = self.train(2, *TRAINING, "--stop-after", 4, "--out", out)
        second, text = self.train(3, *TRAINING, "--out", out, "--resume", "--consolidate", file)
        whole, _ = self.train(1, *TRAINING)
        read_back, _ = self.train(1, *SHAPE, "--load", file, "--sample", 20)

        self.assertEqual((first["first_step"], first["last_step"], second["first_step"], second["last_step"]), (0, 4, 4, 8))
        self.assertAlmostEqual(first["held_out_after"], second["held_out_before"], delta=1e-5)
        self.assertAlmostEqual(second["held_out_after"], whole["held_out_after"], delta=1e-4)
        self.assertAlmostEqual(second["held_out_after"], read_back["held_out_after"], delta=1e-5)
        self.assertEqual(len(read_back["sample"]), 20)
        self.assertFalse([line for line in text.splitlines() if not line.startswith("[r0]")], "only rank 0 speaks")

    def test_gives_the_same_figures_whatever_ranks_share(self):
        whole, _ = self.train(2, *TRAINING, "--threads", 1)
        for strategy in ("shard_gradients", "shard_optimizer", "replicate"):
            other, _ = self.train(2, *TRAINING, "--threads", 1, "--strategy", strategy)
            self.assertEqual(other["held_out_after"], whole["held_out_after"], strategy)
        hybrid, _ = self.train(2, *TRAINING, "--threads", 1, "--shard-group", 1)
        self.assertEqual(hybrid["held_out_after"], whole["held_out_after"])
        half, _ = self.train(2, *TRAINING, "--threads", 1, "--precision", "bf16")
        self.assertAlmostEqual(half["held_out_after"], whole["held_out_after"], delta=0.02)

    def test_gives_the_figures_of_plain_libtorch_on_one_rank(self):
        sharded, _ = self.train(1, *TRAINING, "--threads", 1)
        plain, _ = self.train(1, *TRAINING, "--threads", 1, "--plain")
        self.assertEqual(sharded["loss_first"], plain["loss_first"])
        self.assertAlmostEqual(sharded["held_out_after"], plain["held_out_after"], delta=1e-5)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
