// What all of an engine's threads have in common.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace kvlink {

// A thread that takes no signals: those are the interpreter's.
std::thread start_without_signals(const char* name, std::function<void()> body);

// It runs on these CPUs from now on. Throws std::invalid_argument if it cannot.
void keep_to_cpus(std::thread& thread, const std::vector<int>& cpus);

// The calling thread goes on on another of its CPUs, and may run on all of them afterwards as before. False if it
// stays: it has no other, or the kernel refuses. Whoever keeps it to other CPUs meanwhile, by keep_to_cpus() or from
// outside, has the last word.
bool leave_this_cpu();

// How long the calling thread has run.
std::chrono::nanoseconds thread_ran();

// Tells the CPU that the calling thread only waits, for some 100 ns.
void relax_cpu();

}  // namespace kvlink
