"""From noise to latents: schedules, guidance, denoising."""
