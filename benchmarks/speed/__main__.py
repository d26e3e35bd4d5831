from benchmarks.speed.throughput import main

main()
