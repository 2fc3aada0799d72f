"""Schedules of the learning rate that torch lacks, one file each."""
