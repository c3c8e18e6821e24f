"""Mixtures made from the blend files of Megatron-core and Megatron Energon, so that a job can keep its files."""
