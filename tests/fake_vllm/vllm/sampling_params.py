class RequestOutputKind:
    DELTA = 1
