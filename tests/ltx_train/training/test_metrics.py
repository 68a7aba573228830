"""Step reports: averages over micro-batches, ranks and sigma bins against plain sums."""

import math

import torch

from ltx_train.training.metrics import RunningMean, StepMeter, summarise


def test_summary_over_two_ranks_equals_plain_averages():
    sums = torch.zeros(())
    all_video, all_audio = [], []
    for rank in range(2):
        meter = StepMeter()
        for micro in range(2):
            loss = torch.tensor([1.0 + rank, 2.0 + micro])
            sigma = torch.tensor([0.1, 0.9])
            counts = torch.tensor([True, micro == 1])
            meter.add(loss.mean(), {"video": (loss, sigma, torch.tensor([True, True])), "audio": (loss * 3, sigma, counts)})
            all_video += loss.tolist()
            all_audio += (loss * 3)[counts].tolist()
        sums = sums + meter.tensor()
    report = summarise(sums.tolist(), ranks=2)
    assert math.isclose(report.video_loss, sum(all_video) / len(all_video), rel_tol=1e-6)
    assert math.isclose(report.audio_loss, sum(all_audio) / len(all_audio), rel_tol=1e-6)
    assert math.isclose(report.loss, sum(all_video) / len(all_video), rel_tol=1e-6)
    assert set(report.sigma_bins["video"]) == {"0.00-0.25", "0.75-1.00"}
    assert math.isclose(report.sigma_bins["video"]["0.00-0.25"], 1.5, rel_tol=1e-6)


def test_absent_modality_is_none_and_nan_of_a_silent_sample_does_not_leak():
    meter = StepMeter()
    loss = torch.tensor([0.5, float("nan")])
    meter.add(torch.tensor(0.5), {"video": (loss, torch.tensor([0.3, 0.4]), torch.tensor([True, False]))})
    report = summarise(meter.tensor().tolist(), ranks=1)
    assert report.audio_loss is None and report.video_loss == 0.5


def test_running_mean_has_no_start_bias():
    mean = RunningMean(decay=0.9)
    assert mean.add(4.0) == 4.0
    assert math.isclose(mean.add(2.0), (0.9 * 4 + 2) / 1.9, rel_tol=1e-9)
