"""The sub-commands of ``memopd`` that need nothing but the gym: ``data``, ``world`` and ``doctor``."""
