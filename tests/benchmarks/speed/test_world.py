from memopd_benchmarks.speed.world import measure


def test_the_benchmark_measures_what_it_says():
    found = measure(200)
    assert found["passages"] == 200
    assert found["passages_per_second"] > 0
    assert found["seconds_over_reading_back"] > 1
    assert found["peak_mib"] > 1
