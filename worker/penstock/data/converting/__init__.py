"""Conversion of datasets of any format that is read to formats that are written."""
