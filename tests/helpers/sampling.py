"""Settings of sampling runs."""

from zoo.eval.sample_settings import SampleOptions, SampleSettings


def settings(out, **sample):
    return SampleSettings(sample=SampleOptions(**({"steps": 3, "count": 7, "batch_size": 3} | sample)), out=str(out))
