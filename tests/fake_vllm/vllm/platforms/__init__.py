class _Platform:
    device_type = "gfx1201"

    @staticmethod
    def is_rocm():
        return False


current_platform = _Platform()
