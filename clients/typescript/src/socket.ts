// Many requests on one WebSocket: docs/streaming.md.
import WebSocket from "ws";

export type SocketHeaders = Record<string, string>;

export type SocketMessage =
  | { type: "started"; id: string; headers: SocketHeaders }
  | { type: "event"; id: string; data: unknown; event_id?: string; event?: string }
  | { type: "answer"; id: string; status: number; headers: SocketHeaders; data: unknown }
  | { type: "end"; id: string; complete: boolean };

/** The socket closed before the request had its last message. */
export class SocketClosed extends Error {
  constructor(readonly code: number, reason: string) {
    super(`the socket closed with ${code}: ${reason}`);
  }
}

type Waiting = { messages: SocketMessage[]; wake: () => void };

/** An open socket. `request` may be called any number of times, up to 64 at once. */
export class StreamSocket {
  private readonly running = new Map<string, Waiting>();
  private closed: SocketClosed | undefined;
  private next = 0;

  private constructor(private readonly socket: WebSocket) {
    socket.on("message", (text: Buffer) => {
      const message = JSON.parse(text.toString()) as SocketMessage;
      const waiting = this.running.get(message.id);
      waiting?.messages.push(message);
      waiting?.wake();
    });
    socket.on("close", (code: number, reason: Buffer) => {
      this.closed = new SocketClosed(code, reason.toString());
      for (const waiting of this.running.values()) waiting.wake();
    });
    socket.on("error", () => undefined); // followed by `close`
  }

  /** Open a socket; `baseUrl` is that of the HTTP API. Rejects with the error of the handshake. */
  static open(baseUrl: string, apiKey: string): Promise<StreamSocket> {
    const address = baseUrl.replace(/^http/, "ws") + "/v1/stream";
    const socket = new WebSocket(address, ["fairway.v1", `fairway.key.${apiKey}`]);
    return new Promise((resolve, reject) => {
      socket.once("error", reject);
      socket.once("open", () => resolve(new StreamSocket(socket)));
    });
  }

  /** Yield the messages of a request, the last included. Leaving the loop cancels it. Throws SocketClosed. */
  async *request(path: string, body: object, headers: SocketHeaders = {}): AsyncGenerator<SocketMessage> {
    const id = String(this.next++);
    const waiting: Waiting = { messages: [], wake: () => undefined };
    this.running.set(id, waiting);
    let over = false;
    try {
      if (this.closed === undefined) {
        this.socket.send(JSON.stringify({ type: "request", id, path, headers, body }));
      }
      for (;;) {
        const message = waiting.messages.shift();
        if (message !== undefined) {
          over = message.type === "end" || message.type === "answer";
          yield message;
          if (over) return;
        } else if (this.closed !== undefined) {
          throw this.closed;
        } else {
          await new Promise<void>((resolve) => (waiting.wake = resolve));
        }
      }
    } finally {
      this.running.delete(id);
      if (!over && this.closed === undefined) this.socket.send(JSON.stringify({ type: "cancel", id }));
    }
  }

  close(): void {
    this.socket.close();
  }

  /** End the connection without a close, as a lost network does. */
  terminate(): void {
    this.socket.terminate();
  }
}
