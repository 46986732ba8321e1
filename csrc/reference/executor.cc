#include "csrc/reference/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/reference/machine.h"
#include "csrc/reference/text.h"
#include "csrc/reference/validate.h"

namespace north_jax::megakernel {
namespace {

// Splitmix64 (Steele et al., "Fast splittable pseudorandom number generators").
class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint32_t below(uint32_t n) {
        uint64_t x = state_ += 0x9E3779B97F4A7C15;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
        x = (x ^ x >> 27) * 0x94D049BB133111EB;
        return static_cast<uint32_t>(((x ^ x >> 31) >> 32) * n >> 32);
    }

   private:
    uint64_t state_;
};

// The threads of a quantum.
class Quantum {
   public:
    explicit Quantum(Context& context) : context_(context) {
        for (int32_t sm = 0; sm < context.lists.sms(); ++sm) sms_.emplace_back(context, sm);
        const int32_t threads = std::max(1, std::min(context.options.threads, context.lists.sms()));
        workers_ = std::vector<Worker>(threads);
    }

    std::string run() {
        const int32_t threads = static_cast<int32_t>(workers_.size());
        std::vector<std::thread> others;
        for (int32_t i = 1; i < threads; ++i) others.emplace_back([this, i] { work(i); });
        work(0);
        for (std::thread& other : others) other.join();
        return stuck_ ? report() : fault_;
    }

   private:
    // One in `kSlow` roles is slow for a step: it gets one in `kSlow` of its turns. So that whole waves run while one
    // tile of an earlier one is still to come.
    static constexpr uint32_t kSlow = 16;

    struct Turn {
        Sm* sm;
        Role role;
        bool slow;
    };

    struct alignas(64) Worker {
        std::atomic<uint64_t> progress{0};  // events; written by the worker alone
    };

    void work(int32_t index) {
        try {
            for (int32_t step = context_.decided(); step >= 0 && !ending_;) {
                run_step(index, step);
                Watch watch(*this);
                while (context_.decided() == step && !ending_) watch.pause();
                step = context_.decided();
            }
        } catch (const std::exception& error) {
            const std::lock_guard lock(ending_lock_);
            if (!ending_) fault_ = error.what();
            ending_ = true;
        }
    }

    void run_step(int32_t index, int32_t step) {
        Random random(context_.options.seed + (uint64_t{static_cast<uint32_t>(step)} << 32 | index << 1 | 1));
        const int64_t sms = sms_.size(), threads = workers_.size();
        std::vector<Turn> turns;
        for (int64_t sm = sms * index / threads; sm < sms * (index + 1) / threads; ++sm) {
            sms_[sm].begin_step(step);
            for (int32_t role = 0; role < kRoles; ++role) {
                turns.push_back({&sms_[sm], static_cast<Role>(role), random.below(kSlow) == 0});
            }
        }
        Watch watch(*this);
        std::atomic<uint64_t>& progress = workers_[index].progress;
        const bool in_order = context_.options.seed == 0;
        size_t chosen = 0;
        for (size_t misses = 0; !turns.empty() && !ending_;) {
            if (in_order) {
                chosen %= turns.size();
            } else {
                chosen = random.below(static_cast<uint32_t>(turns.size()));
                if (turns[chosen].slow && random.below(kSlow) != 0) continue;
            }
            switch (turns[chosen].sm->turn(turns[chosen].role)) {
                case Outcome::kProgress:
                    progress.store(progress.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
                    misses = 0;
                    break;
                case Outcome::kBlocked:
                    ++chosen;
                    if (++misses % (16 * turns.size()) == 0) watch.pause();
                    break;
                case Outcome::kDone:
                    turns[chosen] = turns.back();
                    turns.pop_back();
            }
        }
    }

    // Ends the quantum where nothing happens on any thread for too long.
    class Watch {
       public:
        explicit Watch(Quantum& quantum) : quantum_(quantum) {}

        void pause() {
            std::this_thread::yield();
            const auto now = std::chrono::steady_clock::now();
            uint64_t events = 1;
            for (const Worker& worker : quantum_.workers_) events += worker.progress.load(std::memory_order_relaxed);
            if (events != events_) {
                events_ = events;
                since_ = now;
            } else if (std::chrono::duration<double>(now - since_).count() > quantum_.context_.options.timeout_s) {
                const std::lock_guard lock(quantum_.ending_lock_);
                if (!quantum_.ending_) quantum_.stuck_ = true;
                quantum_.ending_ = true;
            }
        }

       private:
        Quantum& quantum_;
        uint64_t events_ = 0;
        std::chrono::steady_clock::time_point since_;
    };

    std::string report() const {
        std::vector<BlockedWait> blocked;
        for (const Sm& sm : sms_) {
            for (int32_t role = 0; role < kRoles; ++role) {
                if (const auto& wait = sm.blocked(static_cast<Role>(role))) blocked.push_back(*wait);
            }
        }
        return describe_deadlock(context_, blocked, context_.decided());
    }

    Context& context_;
    std::vector<Sm> sms_;
    std::vector<Worker> workers_;
    std::atomic<bool> ending_{false};
    std::mutex ending_lock_;
    bool stuck_ = false;
    std::string fault_;
};

}  // namespace

std::string run_quantum(const Model& model, const TaskLists& lists, const Batch& batch, Channel& channel,
                        uint32_t quantum, int32_t steps, const ExecutorOptions& options) {
    std::string fault = validate_batch(model, lists, batch, steps);
    if (fault.empty()) {
        try {
            Context context(model, lists, batch, channel, quantum, steps, options);
            fault = Quantum(context).run();
        } catch (const std::exception& error) {
            fault = error.what();
        }
    }
    std::atomic_ref(channel.finished).store(quantum, std::memory_order_release);
    return fault;
}

}  // namespace north_jax::megakernel
