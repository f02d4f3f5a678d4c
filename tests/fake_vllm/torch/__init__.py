"""Just enough of torch for ci.validate to ask what the machine is."""

__version__ = "0"


class cuda:
    @staticmethod
    def is_available():
        return False


class version:
    hip = cuda = None
