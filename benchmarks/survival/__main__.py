from benchmarks.survival.torture import main

main()
