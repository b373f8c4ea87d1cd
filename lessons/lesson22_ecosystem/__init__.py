"""Lesson 22: one training through Accelerate, the Trainer, DeepSpeed, FSDP2 and Fabric."""
