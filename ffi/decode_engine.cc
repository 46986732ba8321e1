#include "ffi/decode_engine.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "csrc/megakernel/pipeline/limits.h"
#include "csrc/reference/validate.h"

namespace north_jax {
namespace {

using megakernel::Channel;
using megakernel::kRingEntries;
using megakernel::TaskLists;
using megakernel::TokenEntry;

// A waiting reader sleeps between looks: short at first, since a step takes milliseconds, then at most this long.
constexpr std::chrono::microseconds kFirstSleep{50}, kLongestSleep{500};

template <typename T>
T load(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename T>
void store(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

struct Registry {
    std::mutex mutex;
    std::unordered_map<int64_t, std::weak_ptr<DecodeEngine>> engines;
    int64_t next = 1;
};

Registry& registry() {
    static auto* instance = new Registry;  // never destroyed: a call may still come while the process ends
    return *instance;
}

void require(bool holds, const std::string& otherwise) {
    if (!holds) throw std::invalid_argument(otherwise);
}

}  // namespace

DecodeEngine::DecodeEngine(megakernel::Model model, std::unique_ptr<DecodePlatform> platform)
    : model_(std::move(model)), platform_(std::move(platform)) {}

std::shared_ptr<DecodeEngine> DecodeEngine::create(megakernel::Model model, std::unique_ptr<DecodePlatform> platform) {
    std::shared_ptr<DecodeEngine> engine(new DecodeEngine(std::move(model), std::move(platform)));
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    engine->id_ = all.next++;
    all.engines[engine->id_] = engine;
    return engine;
}

std::shared_ptr<DecodeEngine> DecodeEngine::find(int64_t id) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.engines.find(id);
    return found == all.engines.end() ? nullptr : found->second.lock();
}

int32_t DecodeEngine::add_schedule(TaskLists lists) {
    const std::string wrong = megakernel::validate_lists(model_, lists);
    require(wrong.empty(), wrong);
    const auto schedule = std::make_shared<const TaskLists>(std::move(lists));
    const std::lock_guard lock(mutex_);
    platform_->prepare(*schedule);
    schedules_.push_back(schedule);
    return static_cast<int32_t>(schedules_.size()) - 1;
}

uint32_t DecodeEngine::queue(int32_t schedule, int32_t steps, const megakernel::ExecutorOptions& options) {
    const std::lock_guard lock(mutex_);
    require(0 <= schedule && schedule < static_cast<int32_t>(schedules_.size()),
            "no schedule has number " + std::to_string(schedule));
    require(steps >= 1, "a quantum of " + std::to_string(steps) + " steps");
    queue_.push_back({++queued_, schedules_[schedule], steps, options});
    return queued_;
}

std::string DecodeEngine::not_pipelined(int32_t schedule) const {
    const std::lock_guard lock(mutex_);
    require(0 <= schedule && schedule < static_cast<int32_t>(schedules_.size()),
            "no schedule has number " + std::to_string(schedule));
    return megakernel::pipeline::refuse(model_.geometry, model_.type, *schedules_[schedule]);
}

void DecodeEngine::drop_queued() {
    const std::lock_guard lock(mutex_);
    queue_.clear();
}

void DecodeEngine::stop() {
    const std::lock_guard lock(mutex_);
    store(platform_->channel().stop, queued_);
}

void DecodeEngine::cancel(int32_t row, uint32_t quantum) {
    require(0 <= row && row < megakernel::kMaxRows, "no batch has a row " + std::to_string(row));
    store(platform_->channel().cancel[row], quantum);
}

std::vector<TokenEntry> DecodeEngine::take_entries(uint32_t quantum, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    Channel& channel = platform_->channel();
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    const uint64_t read = channel.read;  // the reader alone writes it
    uint64_t written = 0;
    for (auto sleep = kFirstSleep;; sleep = std::min(2 * sleep, kLongestSleep)) {
        const bool over = load(channel.finished) >= quantum;  // before `written`, which is then final
        written = load(channel.written);
        if (written != read || over || Clock::now() >= end) break;
        std::this_thread::sleep_for(sleep);
    }
    std::vector<TokenEntry> entries;
    entries.reserve(written - read);
    for (uint64_t i = read; i < written; ++i) entries.push_back(channel.ring[i % kRingEntries]);
    store(channel.read, written);
    return entries;
}

uint32_t DecodeEngine::finished() const { return load(platform_->channel().finished); }

std::string DecodeEngine::error(uint32_t quantum) const {
    const std::lock_guard lock(mutex_);
    return quantum == failed_ ? error_ : platform_->report();
}

std::optional<Quantum> DecodeEngine::begin_call() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return std::nullopt;
    Quantum quantum = std::move(queue_.front());
    queue_.pop_front();
    ++calls_;
    return quantum;
}

void DecodeEngine::end_call(const Quantum& quantum, const std::string& error) {
    const std::lock_guard lock(mutex_);
    if (!error.empty()) {
        failed_ = quantum.number;
        error_ = error;
    }
    --calls_;
    idle_.notify_all();
}

void DecodeEngine::close() {
    {
        Registry& all = registry();
        const std::lock_guard lock(all.mutex);
        all.engines.erase(id_);
    }
    drop_queued();
    stop();
    std::unique_lock lock(mutex_);
    while (calls_ > 0 || platform_->busy()) {  // a quantum may wait for room in the ring
        store(platform_->channel().read, load(platform_->channel().written));
        idle_.wait_for(lock, kLongestSleep);
    }
}

}  // namespace north_jax
