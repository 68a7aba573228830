"""References made for you: edges, blur, low resolution, grey and depth of every clip, for IC-LoRA training."""

from .kinds import BlurControl, CannyControl, Control, GreyControl, LowResolutionControl
from .make import ReferenceJob, References, make_references

__all__ = ["BlurControl", "CannyControl", "Control", "GreyControl", "LowResolutionControl", "ReferenceJob", "References", "make_references"]
