"""What can be wrong with a stored cache or a calibration; all of it is caught by ``except CodecError``."""


class CodecError(ValueError):
    """A file, a calibration or a cache that the codec cannot use. Nothing was returned or changed."""


class FormatError(CodecError):
    """The file is something else: not a container or not a calibration of this library."""


class VersionError(CodecError):
    """The file was written by a newer version of the format."""


class CorruptFileError(CodecError):
    """The file is truncated, damaged, or contradicts itself."""


class MismatchError(CodecError):
    """The file belongs to another model, calibration or context."""
