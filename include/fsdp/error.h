// Every error that libfsdp throws. what() is one line: what failed, where (rank, unit, operation, step),
// what was expected and what was found, and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

enum class ErrorId {
  kInvalidArgument = 1,  // a caller's value, or a combination that is not supported
  kCommunication = 2,    // a peer died, timed out, or aborted
  kDevice = 3,           // a device call failed
  kCheckpoint = 4,       // a checkpoint is damaged, missing, or of another model
  kMemory = 5,           // an allocation failed
  kNonFinite = 6,        // a gradient is NaN or infinite; thrown as Error itself
  kStepFailed = 7,       // a step was dropped on every rank, because one failed in it
};

class Error : public std::runtime_error {
 public:
  // `rank` is the rank on which the fault arose, or -1 where no rank is involved.
  Error(ErrorId id, const std::string& message, int rank = -1) : std::runtime_error(message), id_(id), rank_(rank) {}
  ErrorId id() const noexcept { return id_; }
  int rank() const noexcept { return rank_; }

 private:
  ErrorId id_;
  int rank_;
};

class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& message, int rank = -1)
      : Error(ErrorId::kInvalidArgument, message, rank) {}
};

class CommunicationError : public Error {
 public:
  explicit CommunicationError(const std::string& message, int rank = -1)
      : Error(ErrorId::kCommunication, message, rank) {}
};

class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message, int rank = -1) : Error(ErrorId::kDevice, message, rank) {}
};

class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message, int rank = -1) : Error(ErrorId::kCheckpoint, message, rank) {}
};

class MemoryError : public Error {
 public:
  explicit MemoryError(const std::string& message, int rank = -1) : Error(ErrorId::kMemory, message, rank) {}
};

// Every rank goes on after this; rank() is the one that failed.
class StepFailed : public Error {
 public:
  explicit StepFailed(const std::string& message, int rank) : Error(ErrorId::kStepFailed, message, rank) {}
};

}  // namespace fsdp
