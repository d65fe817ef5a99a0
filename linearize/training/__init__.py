"""Recovery training: calibration, attention transfer, distillation and fine-tuning of converted models."""
